"""GPU memory beside the weights: the largest step is run once and measured, and the rest is for the KV cache.

Called by workers.cuda.worker while it loads. The arithmetic and the refusal are pure; only `measure_step` touches the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from trireme.errors import ConfigError
from trireme.machine.memory_budget import GPU_GRAPHS as GRAPHS
from trireme.models.cuda.decoder import CudaModel
from trireme.models.cuda.host_adapter import upload
from trireme.models.forward import HostBatch
from trireme.sizes import GIB, format_bytes

MAX_SHARE = 0.97  # the largest value that is suggested


@dataclass(frozen=True, slots=True)
class GpuMemory:
    """Bytes of one GPU. `others` was taken before the model was loaded: driver, libraries, other processes."""

    name: str
    total: int
    others: int
    weights: int
    activations: int
    share: float

    @property
    def left(self) -> int:
        """Bytes for the KV cache, within the share that may be used."""
        return self._left_at(self.share)

    def _left_at(self, share: float) -> int:
        return max(0, int(self.total * share) - self.others - self.weights - self.activations - GRAPHS)

    def check(self, max_len: int, token_bytes: int, *, can_be_narrower: bool = False) -> None:
        """Raises ConfigError when not even one request of `max_len` tokens fits, with settings that would."""
        needed = max_len * token_bytes
        if needed <= self.left:
            return
        fits = self.left // token_bytes
        cures = [f"--max-len {fits:<12} largest that fits"] if fits else []
        if self.share < MAX_SHARE and needed <= self._left_at(MAX_SHARE):
            cures.append(f"--gpu-memory {MAX_SHARE:<9} fits {max_len}")
        if can_be_narrower and needed // 2 <= self.left:
            cures.append(f"--kv-dtype fp8           fits {max_len}")
        if not cures:
            cures.append("--device cpu           or a smaller model")
        gib = [f"{name} {size / GIB:.1f}" for name, size in self._parts()]
        raise ConfigError(
            f"one request of {max_len} tokens needs {format_bytes(needed)} of KV cache; {self.name} has "
            f"{format_bytes(self.left)} left of {format_bytes(int(self.total * self.share))}\n  {'   '.join(gib)} GiB",
            hint="\n".join(cures),
        )

    def _parts(self) -> list[tuple[str, int]]:
        return [
            ("weights", self.weights),
            ("activations", self.activations),
            ("graphs", GRAPHS),
            ("driver and other processes", self.others),
        ]


def check_weights(name: str, weight_bytes: int, free: int) -> None:
    """Raises ConfigError for weights that do not fit, before any is loaded."""
    if weight_bytes > free:
        raise ConfigError(
            f"the weights take {format_bytes(weight_bytes)}; {name} has {format_bytes(free)} free",
            hint="--quantize fp8, --device cpu, or a smaller model",
        )


def largest_step(num_tokens: int, max_len: int, num_logits: int, block_size: int) -> HostBatch:
    """A step of `num_tokens` tokens in prompts as long as possible, with blocks 0, 1, ... in order."""
    lengths = [max_len] * (num_tokens // max_len)
    lengths += [num_tokens - sum(lengths)] if num_tokens % max_len else []
    sizes = np.array(lengths, np.int32)
    width = -(-int(sizes.max()) // block_size)
    table = np.arange(sizes.size * width, dtype=np.int32).reshape(sizes.size, width)
    positions = np.concatenate([np.arange(size, dtype=np.int32) for size in lengths])
    owner = np.repeat(np.arange(sizes.size), sizes)
    starts = np.concatenate(([0], np.cumsum(sizes))).astype(np.int32)
    nothing = np.zeros(sizes.size, np.int32)
    return HostBatch(
        token_ids=np.zeros(num_tokens, np.int32),
        positions=positions,
        slots=table[owner, positions // block_size] * np.int32(block_size) + positions % np.int32(block_size),
        query_start=starts,
        context_len=sizes,
        block_table=table,
        logits_index=np.arange(num_tokens - min(num_logits, num_tokens), num_tokens, dtype=np.int32),
        choices=nothing,
        num_prompt=sizes,
    )


def measure_step(model: CudaModel, batch: HostBatch, block_size: int) -> int:
    """Peak bytes of the step beside the weights; its own small cache is not counted."""
    with torch.inference_mode():
        kv = model.allocate_kv(int(batch.block_table.max()) + 1, block_size)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        model.reserve(batch.token_ids.size)
        model.run(upload(batch, rules=model.prompt_attention.rules, table_rows=model.table_rows), kv).float()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - before
    del kv
    torch.cuda.empty_cache()
    return peak
