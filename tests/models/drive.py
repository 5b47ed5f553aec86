"""Runs a models.forward.Model the way a worker does, for tests: builds HostBatches over shuffled KV blocks; logits as tensors.

Also runs several ranks of one model as threads of this process, over a plain-torch group.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.cpu.kv_layout import fill_nan, kv_shapes
from trireme.models.forward import Group, HostBatch, HostKV, SoloGroup
from trireme.models.load import load_model
from trireme.topology.mesh import Mesh

SOLO = Mesh(1, 1, 1)
KV_DTYPES = {
    torch.float32: np.dtype(np.float32),
    torch.float16: np.dtype(np.float16),
    torch.bfloat16: np.dtype(np.uint16),
    torch.int8: np.dtype(np.int8),
    torch.int16: np.dtype(np.int16),
}


def load(path: Path | str, mesh: Mesh = SOLO, group: Group | None = None, **options: Any) -> Any:
    files = find_model(path)
    return load_model(files, read_arch(files), mesh, group or SoloGroup(), **options)


class Driver:
    """One model (or rank) with its KV; rows are prompts that never leave."""

    def __init__(
        self,
        model: Any,
        num_rows: int,
        max_len: int,
        *,
        block_size: int = 4,
        kv_dtype: torch.dtype = torch.float32,
        num_prompt: int = 1,
    ) -> None:
        self.model = model
        self.num_prompt = num_prompt
        self.block_size = block_size
        blocks_per_row = -(-max_len // block_size)
        num_blocks = num_rows * blocks_per_row + 1
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(7))[: num_rows * blocks_per_row]
        self.table = order.view(num_rows, blocks_per_row).to(torch.int32).numpy()
        heads, dim = model.kv_heads, model.head_dim
        dtype = KV_DTYPES[kv_dtype]
        k_shape, v_shape = kv_shapes(num_blocks, heads, dim, block_size, dtype.name)
        self.kv = [HostKV(np.empty(k_shape, dtype), np.empty(v_shape, dtype)) for _ in range(model.num_kv_layers)]
        for layer in self.kv:
            fill_nan(layer.k)
            fill_nan(layer.v)
        self.computed = [0] * num_rows

    def step(self, rows: Sequence[tuple[int, Sequence[int]]], *, all_logits: bool = False) -> Tensor | None:
        """One forward over (row, new tokens); logits of each row's last token, or of all tokens."""
        tokens: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        starts = [0]
        contexts = []
        for row, new in rows:
            for token in new:
                position = self.computed[row]
                tokens.append(int(token))
                positions.append(position)
                block = int(self.table[row, position // self.block_size])
                slots.append(block * self.block_size + position % self.block_size)
                self.computed[row] += 1
            starts.append(len(tokens))
            contexts.append(self.computed[row])
        index = range(len(tokens)) if all_logits else [stop - 1 for stop in starts[1:]]
        batch = HostBatch(
            token_ids=_ints(tokens),
            positions=_ints(positions),
            slots=_ints(slots),
            query_start=_ints(starts),
            context_len=_ints(contexts),
            block_table=np.ascontiguousarray(self.table[[row for row, _ in rows]]),
            logits_index=_ints(index),
            choices=_ints([0] * len(rows)),
            num_prompt=_ints([self.num_prompt] * len(rows)),
        )
        logits = self.model.forward(batch, self.kv)
        return None if logits is None else torch.from_numpy(logits)


def greedy(
    model: Any, prompts: Sequence[Sequence[int]], num_new: int, *, chunk: int = 0, **options: Any
) -> list[list[int]]:
    """Greedy tokens of all prompts, decoded together after each was prefilled (in chunks when `chunk` > 0)."""
    longest = max(len(prompt) for prompt in prompts)
    driver = Driver(model, len(prompts), longest + num_new, **options)
    outputs: list[list[int]] = []
    for row, prompt in enumerate(prompts):
        size = chunk or len(prompt)
        logits = None
        for start in range(0, len(prompt), size):
            logits = driver.step([(row, prompt[start : start + size])])
        outputs.append([] if logits is None else [int(logits[0].argmax())])
    for _ in range(num_new - 1):
        logits = driver.step([(row, output[-1:]) for row, output in enumerate(outputs)])
        assert logits is not None
        for output, row_logits in zip(outputs, logits, strict=True):
            output.append(int(row_logits.argmax()))
    return outputs


def logits_of(model: Any, tokens: Sequence[int], *, chunk: int = 0, **options: Any) -> Tensor:
    """Logits [T, V] of every position of one sequence, computed in chunks."""
    driver = Driver(model, 1, len(tokens), **options)
    size = chunk or len(tokens)
    parts = [driver.step([(0, tokens[at : at + size])], all_logits=True) for at in range(0, len(tokens), size)]
    return torch.cat([part for part in parts if part is not None])


class _Hub:
    """Meeting point of the threads of one engine."""

    def __init__(self, mesh: Mesh) -> None:
        self.barrier = [threading.Barrier(mesh.tp, timeout=30) for _ in range(mesh.pp)]
        self.parts: list[list[Any]] = [[None] * mesh.tp for _ in range(mesh.pp)]
        self.passed: dict[tuple[int, int], list[Tensor]] = {}
        self.arrived = threading.Condition()


class ThreadGroup:
    """models.forward.Group between threads: plain torch, summed in rank order."""

    def __init__(self, mesh: Mesh, hub: _Hub) -> None:
        self.rank, self.size = mesh.tp_rank, mesh.tp
        self._mesh, self._hub = mesh, hub

    def _exchange(self, x: Tensor) -> list[Tensor]:
        parts, barrier = self._hub.parts[self._mesh.pp_rank], self._hub.barrier[self._mesh.pp_rank]
        parts[self.rank] = x.clone()
        barrier.wait()
        everyone = list(parts)
        barrier.wait()
        return everyone

    def all_reduce(self, x: Tensor) -> Tensor:
        return x if self.size == 1 else x.copy_(torch.stack(self._exchange(x)).sum(0))

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        parts = self._exchange(x)
        assert [part.shape[-1] for part in parts] == sizes
        return torch.cat(parts, dim=-1)

    def send_next(self, x: Tensor) -> None:
        with self._hub.arrived:
            self._hub.passed.setdefault((self._mesh.pp_rank + 1, self.rank), []).append(x.clone())
            self._hub.arrived.notify_all()

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        key = (self._mesh.pp_rank, self.rank)
        with self._hub.arrived:
            assert self._hub.arrived.wait_for(lambda: self._hub.passed.get(key), timeout=30)
            x = self._hub.passed[key].pop(0)
        assert tuple(x.shape) == shape
        assert x.dtype is dtype
        return x


class RankedModel:
    """All ranks of one engine behind the interface of a single model whose KV spans every stage and head."""

    def __init__(
        self, path: Path | str, *, tp: int, pp: int, group_of: Callable[[Mesh], Group] | None = None, **options: Any
    ) -> None:
        """`group_of` makes the group of a rank (default: between threads, in plain torch)."""
        mesh = Mesh(1, pp, tp)
        hub = _Hub(mesh)
        make = group_of or (lambda at: ThreadGroup(at, hub))
        self._meshes = [mesh.at_worker(worker) for worker in range(mesh.num_workers)]
        self.ranks = [load(path, at, make(at), **options) for at in self._meshes]
        self._kv: list[list[HostKV]] = []
        self.head_dim = self.ranks[0].head_dim
        self.kv_heads = 1
        self.num_kv_layers = 1

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> np.ndarray:
        """Runs every rank in its own thread. `kv` gives block count, block size and dtype; each rank has its own KV."""
        if not self._kv or self._kv[0][0].k.dtype != kv[0].k.dtype or self._kv[0][0].k.shape[0] != kv[0].k.shape[0]:
            self._kv = [_kv_like(kv[0], rank) for rank in self.ranks]
        results: list[Any] = [None] * len(self.ranks)

        def run(worker: int) -> None:
            try:
                results[worker] = self.ranks[worker].forward(batch, self._kv[worker])
            except BaseException as error:
                results[worker] = error

        _in_threads([lambda worker=worker: run(worker) for worker in range(len(self.ranks))])
        for result in results:
            if isinstance(result, BaseException):
                raise result
        last = [result for at, result in zip(self._meshes, results, strict=True) if at.is_last_stage]
        assert all(result is None for at, result in zip(self._meshes, results, strict=True) if not at.is_last_stage)
        assert all(np.array_equal(result, last[0], equal_nan=True) for result in last)
        return last[0]


def _kv_like(kv: HostKV, rank: Any) -> list[HostKV]:
    blocks, _, dim, size = kv.k.shape
    shape_k, shape_v = (blocks, rank.kv_heads, dim, size), (blocks, rank.kv_heads, size, dim)
    return [HostKV(np.zeros(shape_k, kv.k.dtype), np.zeros(shape_v, kv.k.dtype)) for _ in range(rank.num_kv_layers)]


def _in_threads(jobs: Sequence[Callable[[], None]]) -> None:
    threads = [threading.Thread(target=job, daemon=True) for job in jobs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"


def _ints(values: Any) -> np.ndarray:
    return np.array(list(values), np.int32)
