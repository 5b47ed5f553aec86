"""Memory arithmetic: bytes of weights and of KV blocks, number of blocks per engine. Pure and torch-free.

Called by resolve (does it fit) before anything is loaded, and by the engine core once its workers have loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from trireme.config import Decision, EngineConfig, SchedulerConfig
from trireme.errors import ConfigError
from trireme.machine.runtime import TORCH, choose_runtime
from trireme.model.bodies import GptBody, MoeBody
from trireme.model.reader import ArchSpec
from trireme.sizes import MIB, format_bytes, parse_bytes
from trireme.topology.mesh import Mesh, split_heads

MOST_SLOTS = (1 << 31) - 1  # tokens of an engine's KV memory: slots are 32-bit numbers
LOGITS_BYTES = 64 * MIB  # maximum size of the logits of one forward
# Base memory of the processes, measured after a start: libraries, tokenizer, buffers.
WORKER_PROGRAM, FRONT_PROGRAM, LAUNCH_PROGRAM = 48 * MIB, 80 * MIB, 40 * MIB
TORCH_LIBRARY = 180 * MIB  # added in a worker that uses torch
GPU_GRAPHS = 640 * MIB  # CUDA graphs of decode steps, and later allocations by the GPU's libraries
GPU_EXPERT_TOKENS = 4096  # tokens that a MoE layer on a GPU computes at a time
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
INTEGER_BYTES = {"int16": 2, "int8": 1}  # for keys and values only
KV_BYTES = {**DTYPE_BYTES, "fp8": 1}


def num_params(arch: ArchSpec) -> int:
    """Parameters of all matrices; norms and biases are negligible and not counted."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    attention = arch.num_layers * arch.hidden * (2 * q + 2 * kv)
    embeddings = arch.vocab_size * arch.hidden * (1 if arch.tie_embeddings else 2)
    return attention + _feed_forward_params(arch) + embeddings


def num_matrix_rows(arch: ArchSpec) -> int:
    """Total outputs of these matrices (of a decoder with a gated FFN): the number of per-output scales."""
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    layers = arch.num_layers * (q + 2 * kv + 2 * arch.hidden + 2 * arch.ffn)
    return layers + arch.vocab_size * (1 if arch.tie_embeddings else 2)


def _feed_forward_params(arch: ArchSpec) -> int:
    """FFN parameters of all layers: three matrices with a gate, two without, plus router and experts."""
    body, wide = arch.body, arch.hidden * arch.ffn
    if isinstance(body, GptBody):
        return arch.num_layers * 2 * wide
    if isinstance(body, MoeBody):
        networks = body.num_experts + (1 if body.shared_expert else 0)
        mixed = 3 * networks * wide + body.num_experts * arch.hidden
        num_mixed = len(body.moe_layers)
        return num_mixed * mixed + (arch.num_layers - num_mixed) * 3 * arch.hidden * body.dense_ffn
    return arch.num_layers * 3 * wide


def _expert_part(arch: ArchSpec) -> float:
    """Fraction of all parameters that belong to routed experts."""
    if not isinstance(arch.body, MoeBody):
        return 0.0
    return len(arch.body.moe_layers) * arch.body.num_experts * 3 * arch.hidden * arch.ffn / num_params(arch)


def kv_token_bytes(arch: ArchSpec, kv_dtype: str, mesh: Mesh) -> int:
    """Bytes of one token's keys and values on the worker that holds the most."""
    heads = max(split_heads(arch.num_heads, arch.num_kv_heads, mesh.tp, rank).kv.size for rank in range(mesh.tp))
    layers = mesh._replace(pp_rank=0).layers(arch.num_layers).size
    return 2 * layers * heads * _kv_head_bytes(arch.head_dim, kv_dtype)


def _kv_head_bytes(head_dim: int, kv_dtype: str) -> int:
    """Bytes of one head of one token; integer types have a float32 scale each."""
    if kv_dtype in INTEGER_BYTES:
        return head_dim * INTEGER_BYTES[kv_dtype] + 4
    return head_dim * KV_BYTES[kv_dtype]


def activation_bytes(arch: ArchSpec, scheduler: SchedulerConfig, num_engines: int = 1) -> int:
    """Upper bound on what one step needs besides weights and KV: activations of every token, and the logits. `num_engines`
    engines split the experts, so each computes the tokens of all of them."""
    heads = (arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    ffn, mixed = arch.ffn, 0
    if isinstance(arch.body, MoeBody):
        ffn = max(arch.body.dense_ffn, arch.ffn if arch.body.shared_expert else 0)
        mixed = num_engines * _mixture_token_bytes(arch, arch.body) + 4 * arch.body.top_k * arch.hidden
    per_token = 4 * (4 * arch.hidden + 3 * ffn + 2 * heads) + mixed
    logits = max(LOGITS_BYTES, scheduler.num_rows * arch.vocab_size * 4)
    return scheduler.num_tokens * per_token + 2 * logits


def _mixture_token_bytes(arch: ArchSpec, body: MoeBody) -> int:
    """Bytes per token in a MoE layer: the token itself, its router logits, and for each chosen expert a pair with expert number,
    position and score. Pairs are gathered (and scaled), each expert writes the intermediate between its two GEMMs (of all tokens
    in the worst case), then results are written and scattered back in order."""
    pair = arch.hidden + arch.ffn
    steps = max(body.top_k * 2 * arch.hidden, 3 * arch.ffn)
    return 4 * (2 * arch.hidden + body.num_experts + body.top_k * pair + steps) + 32 * body.top_k


def gpu_activation_bytes(arch: ArchSpec, scheduler: SchedulerConfig) -> int:
    """Upper bound on what a step on a GPU needs besides weights and KV; the worker measures the real value when it starts."""
    heads = (2 * arch.num_heads + 2 * arch.num_kv_heads) * arch.head_dim
    ffn, mixed = arch.ffn, 0
    if isinstance(arch.body, MoeBody):  # pairs, each with the intermediate between its GEMMs and its result
        pairs = min(scheduler.num_tokens, GPU_EXPERT_TOKENS) * arch.body.top_k
        ffn, mixed = 0, pairs * 2 * (arch.hidden + arch.ffn)
    per_token = 2 * (3 * arch.hidden + 3 * ffn + 2 * heads)
    return scheduler.num_tokens * per_token + mixed + 6 * scheduler.num_rows * arch.vocab_size


class MemoryLine(NamedTuple):
    """One line of a memory table: a number of holders of `each` bytes."""

    what: str
    holders: int
    each: int

    @property
    def total(self) -> int:
        return self.holders * self.each


def memory_shares(config: EngineConfig, arch: ArchSpec, weight_bytes: int, kv_bytes: int) -> list[MemoryLine]:
    """Memory shares of a deployment. `weight_bytes` is one whole copy, `kv_bytes` is per worker."""
    parallel = config.parallel
    sharing = parallel.dp if config.in_lockstep else 1
    weight_bytes -= int(weight_bytes * _expert_part(arch) * (1 - 1 / sharing))
    per_engine = parallel.tp * parallel.pp
    workers = parallel.dp * per_engine
    runtime = choose_runtime(arch, Mesh(parallel.dp, parallel.pp, parallel.tp))
    with_torch = runtime.value == TORCH or per_engine > 1
    return [
        MemoryLine("weights", workers, -(-weight_bytes // per_engine)),
        MemoryLine("KV cache", workers, kv_bytes),
        MemoryLine("activations", workers, activation_bytes(arch, config.scheduler, sharing)),
        MemoryLine("worker program", workers, WORKER_PROGRAM + (TORCH_LIBRARY if with_torch else 0)),
        MemoryLine("frontend", config.serving.api_servers, FRONT_PROGRAM),
        MemoryLine("launcher", 1, LAUNCH_PROGRAM),
    ]


def gpu_shares(config: EngineConfig, arch: ArchSpec, weight_bytes: int, kv_bytes: int) -> list[MemoryLine]:
    """Memory shares of one GPU."""
    return [
        MemoryLine("weights", 1, weight_bytes),
        MemoryLine("KV cache", 1, kv_bytes),
        MemoryLine("activations", 1, gpu_activation_bytes(arch, config.scheduler)),
        MemoryLine("graphs", 1, GPU_GRAPHS),
    ]


def num_kv_blocks(config: EngineConfig, workers: Sequence[tuple[int, int]]) -> tuple[int, Decision]:
    """Blocks of one engine from the (block_bytes, free_bytes) that its workers reported; the smallest one decides.

    Raises ConfigError when not even one request of the maximum length would fit.
    """
    cache, max_len = config.cache, config.model.max_len or 1
    if cache.num_blocks is not None:
        blocks, because = cache.num_blocks, "--num-blocks"
    else:
        budgets = [free if cache.kv_memory is None else parse_bytes(cache.kv_memory) for _, free in workers]
        blocks = min(budget // block for budget, (block, _) in zip(budgets, workers, strict=True))
        blocks = min(blocks, MOST_SLOTS // cache.block_size)
        because = f"{format_bytes(min(budgets))} per worker at {format_bytes(max(b for b, _ in workers))} a block"
    if blocks * cache.block_size < max_len:
        raise too_little_kv(max_len, blocks * cache.block_size, max(b for b, _ in workers) / cache.block_size)
    return blocks, Decision("kv", f"{blocks} blocks, {blocks * cache.block_size} tokens", because)


def too_little_kv(max_len: int, fits: int, token_bytes: float) -> ConfigError:
    """The ConfigError for a length that the KV memory cannot hold, with the numbers that would have worked."""
    cures = [f"--max-len {fits:<12} largest that fits"] if fits else []
    cures.append(f"--kv-memory {math.ceil(max_len * token_bytes / MIB):>6}MiB   fits {max_len}")
    return ConfigError(
        f"one request of {max_len} tokens needs {format_bytes(max_len * token_bytes)} of KV cache per worker; "
        f"there is room for {fits} tokens ({format_bytes(fits * token_bytes)})",
        hint="\n".join(cures),
    )
