"""CudaWorker: one NVIDIA GPU's share of an engine. The same calls as workers.cpu.worker.CpuWorker, and an asynchronous
`launch`.

Used like that one, by module name. All calls but those of a LaunchedStep come from one thread. Each worker has a GPU of its
own (see Mesh.gpu), with its share of the layers.
"""

from __future__ import annotations

import gc
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import msgspec
import torch

from trireme.config import EngineConfig
from trireme.errors import ConfigError, EngineError
from trireme.log import facts
from trireme.machine.gpu_formats import check_gpu, gpu_weight_bytes, weights_by_format
from trireme.machine.gpu_support import compute_dtype
from trireme.machine.graph_sizes import graph_sizes
from trireme.machine.weight_bytes import stored_of
from trireme.model.files import files_of
from trireme.model.reader import ArchSpec, read_arch
from trireme.model.vocabulary import begin_to_count
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda.decoder import DTYPES, CudaModel
from trireme.models.cuda.host_adapter import HostModel
from trireme.models.cuda.sequence_parallel import SPLIT_FROM
from trireme.models.cuda.weight_offload import OffloadedWeights, tensors_of
from trireme.models.cuda.weights.shards import own_weights
from trireme.models.forward import HostKV, Model, SoloGroup
from trireme.models.load import as_decoder, open_checked
from trireme.models.native import find_native
from trireme.models.weights.tp_shards import RankSpans
from trireme.phases import Phases
from trireme.sizes import format_bytes
from trireme.topology.mesh import Mesh
from trireme.transport.wire.messages import StepPlan, StepResult, WorkerInit, WorkerLoaded
from trireme.workers.batch import Batch
from trireme.workers.collectives import make_cuda_group
from trireme.workers.collectives.cuda import CudaGroup
from trireme.workers.collectives.watchdog import STUCK_S
from trireme.workers.cpu.memory import read_memory, usable_cores
from trireme.workers.cpu.runner import Runner
from trireme.workers.cuda.device_state import DeviceRows
from trireme.workers.cuda.graph_adapt import Adaptation
from trireme.workers.cuda.graph_policy import GraphPolicy
from trireme.workers.cuda.graph_sizes import decode_policy, fixed, mixed_policy
from trireme.workers.cuda.graphs import DecodeGraphs, GraphMemory, MixedGraphs
from trireme.workers.cuda.memory import GpuMemory, check_weights, largest_step, measure_step
from trireme.workers.cuda.ranks import RankTicket, launch_with, sampling_mesh
from trireme.workers.cuda.runner import GpuRunner, LaunchedStep
from trireme.workers.cuda.steps import Steps
from trireme.workers.inputs import InputBuilder

log = logging.getLogger("trireme.worker")

START_S = 120.0  # limit for the joint work of ranks at the start
HOST_THREADS = 8  # of the sampler for sequences whose logits the host must see


class CudaWorker:
    """One worker of one engine. Order of calls: load, setup_kv, then launch or execute any number of times, close."""

    def __init__(self, init: WorkerInit, progress: Callable[[str, int, int], None]) -> None:
        self.config = msgspec.msgpack.decode(init.config, type=EngineConfig)
        parallel = self.config.parallel
        self.mesh = Mesh(parallel.dp, parallel.pp, parallel.tp, init.dp_rank).at_worker(init.worker)
        self._progress, self._arena = progress, init.arena
        self._group: CudaGroup | None = None
        self._device = torch.device("cuda")
        self._loaded: tuple[ArchSpec, CudaModel] | None = None
        self._vocab_size = 0  # ids that can be sampled: the tokenizer's, within the model's
        self._batch: Batch | None = None
        self._num_blocks = 0
        self._offloaded: OffloadedWeights | None = None  # offloaded weights of a sleeping model
        self._is_asleep = False
        self._runner: GpuRunner | None = None
        self._adaptation: Adaptation | None = None
        self._policies: tuple[GraphPolicy, GraphPolicy] | None = None  # graph policies outlive a sleep
        self._kv: list[Any] = []
        self.before_forward: Callable[[], object] = lambda: None  # no-op: launching takes no time

    def load(self) -> WorkerLoaded:
        """Loads the weights onto the device and measures the largest step. Raises ModelError or ConfigError with the cause."""
        phases = Phases()
        self._progress("device", 0, 1)
        device = self._device = self._open_device()
        config = self.config
        files = files_of(config.model)
        arch = read_arch(files)
        share, block_size = config.cache.gpu_memory, config.cache.block_size
        free, total = torch.cuda.mem_get_info()
        formats = weights_by_format(config.model, arch, stored_of(files))
        check_gpu(formats, torch.cuda.get_device_capability(device), _name_of(device))
        planned = gpu_weight_bytes(config.model, arch, stored_of(files)) // self.mesh.num_workers
        check_weights(_name_of(device), planned, free)
        shares = RankSpans(arch, self.mesh)
        self._group = self._open_group(2 * config.scheduler.num_rows * max(shares.vocab_sizes))
        self._progress("device", 1, 1)
        phases.end("device")
        known_tokens = begin_to_count(config.model)
        model = self._load_model(arch, device, shares)
        max_len = config.model.max_len or arch.max_position
        phases.end("weights")
        scheduler = config.scheduler
        step = largest_step(scheduler.num_tokens, max_len, scheduler.num_rows, block_size)
        self._progress("measure", 0, 1)
        collectives = self._meet()
        with self._together():
            activations = measure_step(model, step, block_size)
        self._progress("measure", 1, 1)
        held = torch.cuda.memory_reserved()
        in_use = total - torch.cuda.mem_get_info()[0]
        kept = sum(buffer.nbytes for buffer in model.buffers)  # of the activations, already counted in `held`
        memory = GpuMemory(_name_of(device), total, in_use - held, held - kept, activations, share)
        token_bytes = 2 * model.num_kv_layers * model.kv_heads * model.head_dim * model.kv_dtype.itemsize
        if config.cache.kv_memory is None and config.cache.num_blocks is None:
            memory.check(max_len, token_bytes, can_be_narrower=model.kv_dtype.itemsize > 1)
        self._loaded = arch, model
        self._vocab_size = min(model.vocab_size, known_tokens.result() or model.vocab_size)
        phases.end("measure")
        return WorkerLoaded(
            worker=self.mesh.worker,
            vocab_size=self._vocab_size,
            block_bytes=token_bytes * block_size,
            free_bytes=memory.left // self._workers_of_gpu(),
            weight_bytes=model.weight_bytes,
            phases=phases.seconds,
            decisions=[
                ("kernels", _name_of(device), "CUDA " + ".".join(map(str, torch.cuda.get_device_capability(device)))),
                *model.chosen_attention.decisions(),
                *collectives,
            ],
        )

    def _load_model(self, arch: ArchSpec, device: torch.device, shares: RankSpans) -> CudaModel:
        """Loads this worker's weights onto the device."""
        config = self.config
        stored = open_checked(files_of(config.model), arch, dummy=config.model.load_format == "dummy")
        source = as_decoder(stored, arch)
        dtype = DTYPES[compute_dtype(config, arch)]
        weights = own_weights(source, dtype, device, shares, scheme=config.model.quantize)
        model = CudaModel(
            arch,
            weights,
            dtype,
            max_len=config.model.max_len or arch.max_position,
            progress=self._progress,
            place=(self.mesh, self._group),
            kv_dtype=DTYPES.get(config.cache.kv_dtype),
            split_from=SPLIT_FROM if config.parallel.sequence_parallel else 0,
        )
        weights.close()
        torch.cuda.synchronize()
        return model

    def setup_kv(self, num_blocks: int) -> dict[str, float]:
        """Allocates `num_blocks` blocks and the batch, and captures the graphs; the worker can run steps afterwards. Returns the
        seconds of each phase."""
        if self._loaded is None:
            raise EngineError("setup_kv was called before load")
        arch, model = self._loaded
        config = self.config
        max_len = config.model.max_len or arch.max_position
        rows, block_size = config.scheduler.num_rows, config.cache.block_size
        self._num_blocks = num_blocks
        phases = Phases()
        batch = Batch(rows, max_len, block_size, self._vocab_size, num_blocks)
        try:
            self._make_runner(arch, model, batch, phases)
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ConfigError(
                f"{num_blocks} KV blocks, the graphs and a step are more than {_name_of(self._device)} has beside the weights: "
                f"{format_bytes(free)} of {format_bytes(total)} are left",
                hint="a smaller --kv-memory, or leave it out",
            ) from error
        return phases.seconds

    def _make_runner(self, arch: ArchSpec, model: CudaModel, batch: Batch, phases: Phases) -> None:
        """Makes everything on the device but the weights, over a batch that is empty or will not be computed again."""
        config, self._batch = self.config, batch
        block_size, max_rows = config.cache.block_size, config.scheduler.num_rows
        max_tokens, max_len = config.scheduler.num_tokens, config.model.max_len or arch.max_position
        with torch.inference_mode():
            self._kv = model.allocate_kv(self._num_blocks, block_size)
            model.reserve(max(max_tokens, max_rows))
            device = self._device
            rows = DeviceRows(max_rows, batch.blocks.shape[1], device)
            sample = cuda_ops.sample_rows
            steps = Steps(
                model, self._kv, rows, sample, max_tokens=max_tokens, device=device, vocab_size=batch.vocab_size
            )
            memory = GraphMemory(device)
            policies = self._policies = self._policies or self._make_policies(model)
            graphs, mixed = DecodeGraphs(steps, policies[0], memory), MixedGraphs(steps, policies[1], memory)
            phases.end("kv")
            self._capture(graphs, mixed, memory)
        inputs = InputBuilder(max_tokens, max_rows, -(-max_len // block_size))
        keeper = SoloGroup() if config.runs_ahead else None
        host_model, host_kv = cast(Model, HostModel(model)), cast(list[HostKV], self._kv)
        slow = Runner(host_model, host_kv, batch, inputs, sampling_mesh(self.mesh), keeper=keeper)
        self._runner = GpuRunner(steps, graphs, batch, slow, mixed)
        phases.end("graphs")

    def _make_policies(self, model: CudaModel) -> tuple[GraphPolicy, GraphPolicy]:
        """The policies of which decode steps are captured, and which steps with prompts."""
        scheduler = self.config.scheduler
        asked = graph_sizes(self.config.parallel.graph_sizes, scheduler.num_rows)
        if not (self._group is None or self._group.can_be_captured):
            return fixed(()), fixed(())
        fits = model.chosen_attention.fits_graphs
        return (
            decode_policy(asked, scheduler.num_rows),
            mixed_policy(asked, scheduler.num_rows, scheduler.num_tokens) if fits else fixed(()),
        )

    def _capture(self, graphs: DecodeGraphs, mixed: MixedGraphs, memory: GraphMemory) -> None:
        """Initial captures. Ranks cannot skip sizes that do not fit before they have agreed: see Adaptation."""
        is_alone = self._group is None
        with self._together():
            left_out = graphs.set.capture_all("graphs", self._progress, leaves_out=is_alone)
            left_out += mixed.set.capture_all("prompt graphs", self._progress, leaves_out=is_alone)
        if left_out:
            held, most = format_bytes(memory.held), format_bytes(memory.most_bytes)
            log.warning(
                "graphs hold what they may, %d sizes are left out %s", len(left_out), facts(held=held, most=most)
            )
        self._adaptation = Adaptation(graphs, mixed, memory, self._as_in_a_step, is_alone=is_alone)

    @contextmanager
    def _as_in_a_step(self) -> Iterator[None]:
        """Around a change of the captured graphs while serving: other ranks make it too, and must not be kept waiting."""
        torch.cuda.synchronize()
        try:
            with torch.inference_mode(), self._together(STUCK_S):
                yield
        except BaseException:
            if self._group is not None:
                self._group.abort()
            raise

    def launch(self, plan: StepPlan) -> LaunchedStep | RankTicket:
        """Starts one step behind those in flight; its LaunchedStep waits for the result, in any thread."""
        runner = self._need_runner()
        with torch.inference_mode():
            if self._group is None:
                return runner.launch(plan)
            reports = self.mesh.reports_result
            return launch_with(self._group, lambda: runner.launch(plan), self._device, reports=reports)

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Runs one step to completion."""
        return self.launch(plan).result()

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """Rare requests, by name: `info`, `adapt` (captured graphs), `sleep` and `wake`, and `poison` (fills KV blocks with NaN;
        tests). Others raise EngineError."""
        if method == "info":
            return self._info()
        if method == "adapt":
            if self._adaptation is None:
                raise EngineError("nothing is captured before setup_kv, or during a sleep")
            return self._adaptation.adapt(args["known"], is_idle=bool(args["is_idle"]))
        if method in ("sleep", "wake"):
            return self._sleep(int(args["level"])) if method == "sleep" else self._wake()
        if method == "poison":
            for layer in self._kv:
                for side in (layer.k, layer.v):  # (torch cannot index float8; its NaN is all ones)
                    part = side.view(torch.uint8) if side.element_size() == 1 else side
                    part[args["blocks"]] = 127 if part.dtype == torch.uint8 else float("nan")
            return None
        raise EngineError(f"a worker has no method {method!r}; it has info, adapt, sleep, wake, poison")

    def _sleep(self, level: int) -> None:
        """Frees the memory of KV cache, graphs and activations, and that of the weights: level 1 offloads them to host memory.
        A worker that sleeps with offloaded weights drops them for level 2. Every earlier step must have ended."""
        if self._is_asleep:
            self._loaded = self._offloaded = None
            _collect()
            return
        if self._loaded is None or self._runner is None:
            raise EngineError("this worker has nothing to put away")
        arch, model = self._loaded
        torch.cuda.synchronize()
        self._runner, self._adaptation, self._kv = None, None, []
        model.reserve(0)
        self._offloaded = OffloadedWeights(tensors_of(model)) if level == 1 else None
        if self._offloaded is not None:
            self._offloaded.offload()
        else:
            self._loaded = None
        del model
        self._is_asleep = True
        _collect()
        torch.cuda.empty_cache()

    def _wake(self) -> None:
        """Restores the state before the sleep, with an empty KV cache. Raises ConfigError when other processes took the memory."""
        try:
            if self._offloaded is not None:
                self._offloaded.restore()
                assert self._loaded is not None
                arch, model = self._loaded
            else:
                arch = read_arch(files_of(self.config.model))
                model = self._load_model(arch, self._device, RankSpans(arch, self.mesh))
            self._meet()
            assert self._batch is not None
            self._loaded, self._offloaded = (arch, model), None
            self._make_runner(arch, model, self._batch, Phases())
        except torch.OutOfMemoryError as error:
            free, total = torch.cuda.mem_get_info()
            raise ConfigError(
                f"waking needs more memory than {_name_of(self._device)} has free: {format_bytes(free)} of {format_bytes(total)}",
                hint="end what else uses the GPU",
            ) from error
        self._is_asleep = False

    def close(self) -> None:
        """Releases model and KV and frees their memory."""
        if self._group is not None:
            self._group.close()
        self._runner = self._adaptation = None
        self._loaded = None
        self._kv = []
        torch.cuda.empty_cache()

    def _open_device(self) -> torch.device:
        """This worker's GPU. Raises ConfigError when torch sees none, or the kernels are not built."""
        if not torch.cuda.is_available():
            raise ConfigError(
                f"--device cuda: torch {torch.__version__} sees no NVIDIA GPU (built for CUDA {torch.version.cuda})",
                hint="check nvidia-smi and that torch is built for CUDA, or --device cpu",
            )
        count, needed = torch.cuda.device_count(), self.mesh.dp * self.mesh.num_workers
        if needed > count and not self.config.parallel.share_gpus:
            raise ConfigError(
                f"{needed} workers need a GPU each; torch sees {count}", hint="fewer workers, or --share-gpus"
            )
        index = self.mesh.gpu(count)
        cuda_ops.load()
        torch.cuda.set_device(index)
        torch.set_num_threads(1)
        native = find_native()
        if native is not None:
            native.set_num_threads(min(HOST_THREADS, usable_cores()))
        return torch.device("cuda", index)

    def _workers_of_gpu(self) -> int:
        return -(-self.mesh.dp * self.mesh.num_workers // torch.cuda.device_count())

    def _open_group(self, gathered_bytes: int) -> CudaGroup | None:
        """The group of this engine's ranks, None for a single rank."""
        if self.mesh.num_workers == 1:
            return None
        wait_s = self.config.launch.start_timeout
        return make_cuda_group(
            self.mesh, self._arena, torch.cuda.device_count(), gathered_bytes=gathered_bytes, load_timeout_s=wait_s
        )

    def _meet(self) -> list[tuple[str, str, str]]:
        """Waits until all ranks have their weights. Returns the all-reduce choices, as decisions."""
        if self._group is None:
            return []
        with self._group.guard(self.config.launch.start_timeout):
            self._group.barrier()
        found = [("sums over GPUs", *self._group.measure())]
        if not self._group.can_be_captured:
            found.append(("CUDA graphs", "off", "a step waits for what passes between GPUs through the host"))
        return found

    @contextmanager
    def _together(self, stuck_s: float = START_S) -> Iterator[None]:
        """Around work in which the device may wait for other ranks."""
        if self._group is None:
            yield
            return
        with self._group.guard(stuck_s):
            yield
            torch.cuda.synchronize()
        self._group.check()

    def _need_runner(self) -> GpuRunner:
        if self._runner is None:
            raise EngineError(f"a step arrived {'during a sleep' if self._is_asleep else 'before setup_kv'}")
        return self._runner

    def _info(self) -> dict[str, Any]:
        runner = self._runner
        return {
            "worker": self.mesh.worker,
            "steps": runner.num_steps if runner else 0,
            "slow_steps": runner.num_slow if runner else 0,
            "rows": runner.num_rows if runner else 0,
            "pid": os.getpid(),
            "own_bytes": read_memory().own,
            "gpu_bytes": torch.cuda.memory_reserved(),
            "torch": True,
        }


def _collect() -> None:
    """Collects reference cycles, as graphs and caches are: also those from start-up, which the collector was told to skip
    (transport.process.boot.settle_memory)."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


def _name_of(device: torch.device) -> str:
    return f"{device} ({torch.cuda.get_device_name(device)})"


Worker = CudaWorker
"""The name under which executors find the class."""
