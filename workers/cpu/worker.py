"""CpuWorker: one device's share of one engine: loads its slice of the model, owns its KV, executes StepPlans.

Used by workers.main (own process) and by the engine's in-process executor, which imports this module by name. All calls
come from one thread. workers.fake.FakeWorker has the same methods and no tensors.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import msgspec

from trireme.config import Decision, EngineConfig
from trireme.errors import ConfigError, EngineError
from trireme.machine.runtime import TORCH, choose_runtime
from trireme.model.files import files_of
from trireme.model.reader import ArchSpec, read_arch
from trireme.model.vocabulary import begin_to_count
from trireme.models.forward import Group, HostKV, Model
from trireme.models.load import load_model
from trireme.models.native import load_native
from trireme.phases import Phases
from trireme.sleep import NO_SLEEP
from trireme.topology.mesh import Mesh
from trireme.transport.wire.messages import StepPlan, StepResult, WorkerInit, WorkerLoaded
from trireme.workers.batch import Batch
from trireme.workers.collectives import make_group
from trireme.workers.cpu.kv_pages import ResidentKv
from trireme.workers.cpu.memory import activation_bytes, kv_share, read_memory, usable_cores
from trireme.workers.cpu.runner import Runner
from trireme.workers.inputs import InputBuilder
from trireme.workers.kv.tensors import KvDtype, allocate_kv, block_bytes, choose_kv_dtype, poison_blocks

if TYPE_CHECKING:
    from trireme.workers.collectives.expert_parallel import ExpertParallelPeers


class CpuWorker:
    """One worker of one engine. Order of calls: load, setup_kv, then execute any number of times, close."""

    def __init__(self, init: WorkerInit, progress: Callable[[str, int, int], None]) -> None:
        self.config = msgspec.msgpack.decode(init.config, type=EngineConfig)
        parallel = self.config.parallel
        self.mesh = Mesh(parallel.dp, parallel.pp, parallel.tp, init.dp_rank).at_worker(init.worker)
        self._arena = init.arena
        self._peers_arena = init.peers
        self._lockstep_peers: ExpertParallelPeers | None = None
        self._native = _native_kernels()
        self._progress = progress
        self._loaded: tuple[ArchSpec, Model, KvDtype] | None = None
        self._vocab_size = 0  # ids that can be sampled: the tokenizer's, within the model's
        self._kv: list[HostKV] = []
        self._runner: Runner | None = None
        self._pages: ResidentKv | None = None
        self._group: Group | None = None
        self.before_forward: Callable[[], object] = lambda: None  # called before other threads get the interpreter
        self._abort_group: Callable[[], None] | None = None

    def load(self) -> WorkerLoaded:
        """Loads this worker's slice of the weights. Raises ModelError or ConfigError with the cause."""
        started, before = time.perf_counter(), read_memory()
        num_threads, threads = self._set_threads()
        files = files_of(self.config.model)
        arch = read_arch(files)
        runtime = choose_runtime(arch, self.mesh)
        limit_s = self.config.collective_timeout
        group = make_group(self.mesh, self._arena, timeout_s=limit_s, step_timeout_s=limit_s)
        self._group = group
        self._abort_group = getattr(group, "abort", None)
        asked = self.config.model
        known_tokens = begin_to_count(asked)
        experts = None
        if self._peers_arena:
            from trireme.workers.collectives.expert_parallel import ExpertParallelPeers

            self._lockstep_peers = ExpertParallelPeers(self._peers_arena, self.mesh, timeout_s=limit_s)
            experts, self._abort_group = self._lockstep_peers.experts, self._lockstep_peers.abort
        model = load_model(
            files,
            arch,
            self.mesh,
            group,
            asked.dtype,
            self._progress,
            max_len=asked.max_len,
            quantize=asked.quantize,
            dummy=asked.load_format == "dummy",
            experts=experts,
        )
        if self._lockstep_peers is not None:
            self._lockstep_peers.join(model)
        if runtime.value == TORCH:
            from trireme.models.cpu.tensors import use_threads

            # the native kernels' pool computes where they are built; torch's own threads would only spin
            use_threads(num_threads if self._native is None else 1)
        kv_dtype, kv_decision = choose_kv_dtype(self.config.cache.kv_dtype, arch, self.config.cache.block_size)
        self._loaded = arch, model, kv_dtype
        self._vocab_size = min(model.vocab_size, known_tokens.result() or model.vocab_size)
        facts, parallel = read_memory(), self.config.parallel
        step_bytes = activation_bytes(arch, self.config.scheduler, parallel.dp if self.config.in_lockstep else 1)
        return WorkerLoaded(
            worker=self.mesh.worker,
            vocab_size=self._vocab_size,
            block_bytes=block_bytes(model, self.config.cache.block_size, kv_dtype),
            free_bytes=kv_share(facts, step_bytes, parallel.dp * self.mesh.num_workers, self.mesh.num_workers),
            weight_bytes=max(0, facts.own - before.own),
            phases={"weights": time.perf_counter() - started},  # reading the files and everything around it
            decisions=[
                _as_tuple(choice) for choice in (*threads, runtime, *_kernel_decisions(self._native), kv_decision)
            ],
        )

    def setup_kv(self, num_blocks: int) -> dict[str, float]:
        """Allocates `num_blocks` blocks and the persistent batch; the worker can run steps afterwards. Returns the seconds of each
        phase."""
        phases = Phases()
        arch, model, kv_dtype = self._need_model()
        config = self.config
        block_size, max_rows = config.cache.block_size, config.scheduler.num_rows
        max_len = config.model.max_len or arch.max_position
        self._kv = allocate_kv(model, num_blocks, block_size, kv_dtype)
        self._pages = ResidentKv(self._kv)
        self._pages.start()
        batch = Batch(max_rows, max_len, block_size, self._vocab_size, num_blocks)
        inputs = InputBuilder(config.scheduler.num_tokens, max_rows, -(-max_len // block_size))
        self._runner = Runner(
            model,
            self._kv,
            batch,
            inputs,
            self.mesh,
            keeper=self._group if config.runs_ahead else None,
            lockstep_peers=self._lockstep_peers,
        )
        phases.end("kv")
        return phases.seconds

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step; see Runner.execute. If it raises, the other workers' collectives fail at once instead of waiting."""
        if self._runner is None:
            raise EngineError("a step arrived before setup_kv")
        self._runner.before_forward = self.before_forward
        try:
            result = self._runner.execute(plan)
            if self._pages is not None:
                self._pages.follow(self._runner.num_used_blocks)
            return result
        except BaseException:
            if self._abort_group is not None:
                self._abort_group()
            raise

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Rare requests, by name: `info`, and `poison` (fills KV blocks with NaN; tests). Others raise EngineError."""
        if method == "info":
            return self._info()
        if method == "poison":
            poison_blocks(self._kv, [int(block) for block in args["blocks"]])
            return None
        if method in ("sleep", "wake"):
            raise EngineError(NO_SLEEP)
        raise EngineError(f"a worker has no method {method!r}; it has info, poison")

    def close(self) -> None:
        """Releases model and KV."""
        if self._pages is not None:
            self._pages.stop()
        self._runner = self._pages = None
        self._loaded = None
        self._kv = []

    def _need_model(self) -> tuple[ArchSpec, Model, KvDtype]:
        if self._loaded is None:
            raise EngineError("setup_kv was called before load")
        return self._loaded

    def _info(self) -> dict[str, Any]:
        steps = self._runner.num_steps if self._runner else 0
        rows = self._runner.num_rows if self._runner else 0
        return {
            "worker": self.mesh.worker,
            "steps": steps,
            "rows": rows,
            "pid": os.getpid(),
            "own_bytes": read_memory().own,
            "torch": "torch" in sys.modules,
            **(self._lockstep_peers.facts() if self._lockstep_peers is not None else {}),
        }

    def _set_threads(self) -> tuple[int, list[Decision]]:
        """Sizes the native pool so that the machine has no more threads than cores."""
        parallel = self.config.parallel
        cores, num_workers = usable_cores(), parallel.dp * parallel.pp * parallel.tp
        if parallel.threads is not None:
            count, because = parallel.threads, "--threads was given"
        else:
            count, because = max(1, cores // num_workers), f"{cores} usable cores over {num_workers} workers"
        if self._native is not None:
            self._native.set_num_threads(count)
        return count, [Decision("threads", str(count), because), self._pin(count, num_workers)]

    def _pin(self, threads: int, num_workers: int) -> Decision:
        """Pins the pool's threads to cores of their own, after those of the preceding workers."""
        mine = sorted(os.sched_getaffinity(0))
        first = (self.mesh.dp_rank * self.mesh.num_workers + self.mesh.worker) * threads
        cores = mine[first : first + threads]
        choice = choose_pinning(self.config.parallel.pin_cores, threads * num_workers, len(mine))
        if choice.value != "off" and self._native is not None and len(cores) == threads:
            self._native.set_cores(cores)
        return choice


def choose_pinning(asked: str, threads: int, cores: int) -> Decision:
    """Whether to pin the `threads` compute threads of the whole deployment to single cores of `cores`."""
    if asked == "off":
        return Decision("pinned cores", "off", "--pin-cores off")
    if threads > cores:
        return Decision("pinned cores", "off", f"{threads} threads take turns on {cores} cores")
    if asked == "on":
        return Decision("pinned cores", "on", "--pin-cores on")
    if threads == cores:
        return Decision("pinned cores", "off", "the frontend and the engine need a core among the computing threads")
    if 2 * threads <= cores:
        return Decision("pinned cores", "off", f"{threads} of {cores} cores: another deployment may pin the same ones")
    return Decision("pinned cores", "on", f"{threads} threads on {cores} cores: the other processes have the rest")


def _native_kernels() -> ModuleType | None:
    """The compiled extension, or None where it is not built: stub models run without it."""
    try:
        return load_native()
    except ConfigError:
        return None


def _kernel_decisions(native: ModuleType | None) -> list[Decision]:
    if native is None:
        because = "the extension trireme.models._native is not built (make native)"
        return [Decision("kernels", "torch", because), Decision("attention", "torch reference", because)]
    isa = str(native.isa())
    kernels = Decision("kernels", isa, "the best instruction set of this machine")
    if not hasattr(native, "paged_attention"):
        return [kernels, Decision("attention", "torch reference", "the extension holds no attention kernels")]
    return [kernels, Decision("attention", f"native paged ({isa})", "float32 activations on the CPU")]


def _as_tuple(decision: Decision) -> tuple[str, str, str]:
    return decision.what, decision.value, decision.because


Worker = CpuWorker
"""The name under which executors find the class."""
