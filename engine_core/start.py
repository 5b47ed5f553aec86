"""From unloaded workers to a core that fits them: load, size the KV memory, set the limits.

Used by main (own process) and local (a thread). Blocks while workers load; touches no frontend socket.
"""

from __future__ import annotations

from collections.abc import Callable

from trireme.config import Decision, EngineConfig
from trireme.engine_core.core import EngineCore
from trireme.engine_core.executor.base import Executor
from trireme.engine_core.scheduling.policies.base import POLICIES, PolicySettings
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.machine.graph_sizes import graph_sizes
from trireme.machine.memory_budget import num_kv_blocks
from trireme.machine.step_sizes import padded_decodes
from trireme.phases import Phases, slowest
from trireme.targets import CPU_ITL_S, decode_steps, itl_targets, most_crowd, ttft_target
from trireme.transport.wire.messages import LoadProgress, WorkerLoaded


def limits_from_config(config: EngineConfig, *, vocab_size: int, num_blocks: int) -> Limits:
    """Limits for the scheduler; fields left open by a resolved config get their documented defaults."""
    scheduler, cache = config.scheduler, config.cache
    max_len = min(config.model.max_len or num_blocks * cache.block_size, num_blocks * cache.block_size)
    max_waiting = 4 * scheduler.num_rows if scheduler.max_waiting is None else scheduler.max_waiting
    return Limits(
        max_len=max_len,
        vocab_size=vocab_size,
        num_blocks=num_blocks,
        block_size=cache.block_size,
        max_num_seqs=scheduler.num_rows,
        max_num_tokens=scheduler.num_tokens,
        chunk=scheduler.num_tokens if scheduler.chunk is None else scheduler.chunk,
        max_waiting=max_waiting,
        max_waiting_tokens=scheduler.queue_tokens(max_len),
        queue_timeout=scheduler.queue_timeout,
        max_wait=scheduler.max_wait,
        prefix_cache=cache.prefix_cache,
        itl_target=itl_targets(scheduler.itl_target, CPU_ITL_S)["default"],
        most_crowd=most_crowd(scheduler.itl_target),
        decode_steps=decode_steps(is_on_gpu=config.parallel.worker_kind == "cuda"),
        ttft_target=ttft_target(scheduler.ttft_target),
        padded_decodes=_padded_decodes(config),
    )


def _padded_decodes(config: EngineConfig) -> tuple[int, ...]:
    """Those of the steps with prompts that the workers capture; none on a CPU and without graphs."""
    rows = config.scheduler.num_rows
    asked = graph_sizes(config.parallel.graph_sizes, rows)
    most = rows if asked.adapts else max(asked.named, default=0)
    return padded_decodes(most) if most and config.parallel.worker_kind == "cuda" else ()


class Started:
    """Workers that are ready for steps, and the core that fits them."""

    def __init__(self, core: EngineCore, workers: list[WorkerLoaded], kv: Decision) -> None:
        self.core = core
        self.decisions = [choice for loaded in workers[:1] for choice in loaded.decisions]
        self.decisions.append((kv.what, kv.value, kv.because))


def start_core(
    config: EngineConfig,
    executor: Executor,
    progress: Callable[[LoadProgress], None],
    *,
    engine: int = 0,
    epoch: int = 0,
    phases: Phases | None = None,
) -> Started:
    """Loads the workers, sizes the KV memory by the smallest one, and makes the core. Raises the workers' error."""
    POLICIES.find(config.scheduler.policy)  # fails before minutes of loading
    phases = phases or Phases()
    workers = executor.load(progress)
    phases.include(slowest([worker.phases for worker in workers]), "workers")
    num_blocks, decision = num_kv_blocks(config, [(worker.block_bytes, worker.free_bytes) for worker in workers])
    phases.include(executor.setup_kv(num_blocks), "kv")
    limits = limits_from_config(config, vocab_size=workers[0].vocab_size, num_blocks=num_blocks)
    core = EngineCore(
        limits,
        engine=engine,
        epoch=epoch,
        depth=executor.depth,
        ahead=config.runs_ahead,
        check=config.scheduler.check,
        policy=config.scheduler.policy,
        policy_settings=PolicySettings(
            aging_s=config.scheduler.aging, due_s=config.scheduler.queue_timeout or PolicySettings().due_s
        ),
    )
    return Started(core, workers, decision)
