"""Whether a resolved configuration fits into this machine's memory, and which flags would make it fit. Pure and torch-free.

Called by resolve, so that nothing starts that would be killed later, and by `trireme plan`, which gives the same answer.
"""

from __future__ import annotations

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.machine.device import DeviceFacts
from trireme.machine.memory_budget import DTYPE_BYTES, MOST_SLOTS, MemoryLine, kv_token_bytes, memory_shares
from trireme.model.reader import ArchSpec
from trireme.sizes import MIB, format_bytes, parse_bytes
from trireme.topology.mesh import Mesh

BLOCK_RECORD = 320  # bytes per block in an engine: reference counts, content hash, position in the free list
FILLED = 0.99  # fraction of free memory that a suggested size may use: a little less is free a moment later
THREADS_PER_CORE = 4  # beyond this, threads only preempt each other


def kv_tokens_of(config: EngineConfig, token_bytes: int) -> int:
    """Tokens that the KV blocks of one engine hold; `token_bytes` is per token on one worker, 0 for models without KV."""
    cache = config.cache
    if cache.num_blocks is not None:
        return cache.num_blocks * cache.block_size
    block = token_bytes * cache.block_size
    return parse_bytes(cache.kv_memory or "1MiB") // block * cache.block_size if block else 0


def shares_on_host(config: EngineConfig, arch: ArchSpec, weight_bytes: int) -> list[MemoryLine]:
    """Memory shares on a CPU host; `weight_bytes` is one loaded copy of the weights."""
    parallel, block_size = config.parallel, config.cache.block_size
    has_kv = arch.family != "stub" and parallel.worker != "fake"
    mesh = Mesh(parallel.dp, parallel.pp, parallel.tp)
    token_bytes = kv_token_bytes(arch, config.cache.kv_dtype, mesh) if has_kv else 0
    held = kv_tokens_of(config, token_bytes)
    shares = memory_shares(config, arch, weight_bytes, held * token_bytes)
    return [*shares, MemoryLine("block records", parallel.dp, held // block_size * BLOCK_RECORD)]


def free_for(shares: list[MemoryLine], device: DeviceFacts) -> int:
    """Bytes available to a deployment of these shares: free memory, plus what its programs hold already."""
    programs = sum(share.total for share in shares if share.what in ("worker program", "frontend", "launcher"))
    return device.memory_free + min(device.memory_held, programs)


def room_for_kv(config: EngineConfig, arch: ArchSpec, weight_bytes: int, device: DeviceFacts) -> int:
    """Bytes left for the KV caches of all workers once everything else is allocated, at least 0."""
    shares = shares_on_host(config, arch, weight_bytes)
    rest = sum(share.total for share in shares if share.what not in ("KV cache", "block records"))
    mesh = Mesh(config.parallel.dp, config.parallel.pp, config.parallel.tp)
    block = kv_token_bytes(arch, config.cache.kv_dtype, mesh) * config.cache.block_size
    return max(free_for(shares, device) - rest, 0) * block // (block + BLOCK_RECORD)


def shortage(config: EngineConfig, shares: list[MemoryLine], free: int) -> ConfigError | None:
    """Why these shares do not fit into `free` bytes, with flags that would; None where they fit."""
    over = sum(share.total for share in shares) - free
    return too_much(config, shares, over) if over > 0 else None


def check_memory(config: EngineConfig, arch: ArchSpec, weight_bytes: int, device: DeviceFacts) -> None:
    """Raises ConfigError, with what would fit, where a resolved configuration needs more memory than is free."""
    shares = shares_on_host(config, arch, weight_bytes)
    refusal = shortage(config, shares, free_for(shares, device))
    if refusal is not None:
        raise refusal


def too_much(config: EngineConfig, shares: list[MemoryLine], over: int) -> ConfigError:
    """The ConfigError for a configuration that needs `over` bytes more than are free."""
    cache = config.cache
    kv = f"--num-blocks {cache.num_blocks}" if cache.num_blocks is not None else f"--kv-memory {cache.kv_memory}"
    needed = sum(share.total for share in shares)
    return ConfigError(
        f"with {kv} it needs {format_bytes(needed)}, {format_bytes(over)} more than is free",
        hint="\n".join(cures_of_size(config, shares, over)),
    )


def cures_of_size(config: EngineConfig, shares: list[MemoryLine], over: int) -> list[str]:
    """Flags that would make it fit: less KV memory, half the bytes per token, or a smaller model."""
    cures = []
    kv = next(share for share in shares if share.what == "KV cache")
    records = sum(share.total for share in shares if share.what == "block records")
    held = kv.total + records
    part = max(held - over, 0) / held * FILLED if held else 0.0
    if config.cache.num_blocks is not None:
        if (blocks := min(int(config.cache.num_blocks * part), MOST_SLOTS // config.cache.block_size)) > 0:
            cures.append(f"--num-blocks {blocks}   fits")
    elif (smaller := int(kv.each * part) // MIB) > 0:
        cures.append(f"--kv-memory {smaller}MiB   fits")
    if config.parallel.worker_kind == "cuda":
        if config.cache.kv_dtype != "fp8":
            cures.append("--kv-dtype fp8   half the memory per token, less exact")
        if config.model.quantize is None:
            cures.append("--quantize fp8   dense weights in 8 bits")
        return [*cures, "--max-num-tokens 2048   smaller steps need less memory"]
    if config.cache.kv_dtype == "float32":
        cures.append("--kv-dtype float16   half the memory per token")
    elif config.cache.kv_dtype != "int8":
        cures.append("--kv-dtype int8   half the memory per token, less exact")
    if config.model.quantize is None and config.model.dtype in DTYPE_BYTES:
        cures.append("--quantize q8_0   dense weights in 8 bits")
    if config.scheduler.num_tokens > 256:
        cures.append("--max-num-tokens 256   smaller steps need less memory")
    if config.parallel.dp > 1 or config.serving.api_servers > 1:
        cures.append("fewer of --dp and --api-servers")
    return cures or ["a smaller or more strongly quantized model"]


def check_slots(config: EngineConfig) -> None:
    """Raises ConfigError for more blocks than slot numbers allow."""
    blocks, size = config.cache.num_blocks, config.cache.block_size
    if blocks is not None and blocks * size > MOST_SLOTS:
        raise ConfigError(
            f"--num-blocks {blocks} of {size} tokens are more than {MOST_SLOTS} tokens",
            hint=f"--num-blocks {MOST_SLOTS // size}",
        )


def check_threads(config: EngineConfig, device: DeviceFacts) -> None:
    """Raises ConfigError for more threads per worker than are useful."""
    threads, most = config.parallel.threads, THREADS_PER_CORE * max(device.cores, 1)
    if threads is not None and threads > most:
        raise ConfigError(
            f"--threads is {threads}; at most {most} per worker are of use on {device.cores} cores",
            hint=f"--threads {device.cores}",
        )
