"""Turns a requested EngineConfig into a resolved one: every "auto" and None decided, with a Decision that gives the reason.

`prepare` inspects the model and the machine and is called by the launcher and by LLM(); `resolve` is pure, and the rest is
arithmetic. What is decided here is never decided again elsewhere.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from trireme.config import CPU_ROWS, CPU_TOKENS, GPU_ROWS, GPU_TOKENS, Decision, EngineConfig
from trireme.errors import ConfigError
from trireme.machine.device import DeviceFacts, read_device
from trireme.machine.fits import check_memory, check_slots, check_threads, room_for_kv
from trireme.machine.gpu_formats import Stored, expansion_of, gpu_weight_bytes
from trireme.machine.gpu_support import choose_device, compute_dtype, refuse_on_cpu
from trireme.machine.graph_sizes import graph_sizes
from trireme.machine.memory_budget import DTYPE_BYTES, kv_token_bytes, num_params, too_little_kv
from trireme.machine.weight_bytes import loaded_bytes, stored_bytes, stored_of
from trireme.model.bodies import MoeBody
from trireme.model.files import files_of
from trireme.model.reader import ArchSpec, read_arch
from trireme.sizes import GIB, MIB, format_bytes, format_seconds, parse_bytes
from trireme.targets import AUTO, SOFT, automatic_itl_target, itl_targets, ttft_target
from trireme.topology.mesh import Mesh, split_evenly, split_heads
from trireme.topology.zones import fleet_of

KV_SHARE = 0.4  # fraction of the memory left after the weights, for KV blocks on a machine that others use too
KV_LARGEST = 4 * GIB  # per engine, unless asked for
MOST_FREE_BLOCKS = 1 << 16
FFN_UNIT = 32  # columns of one quant block


def _in_units(size: int, unit: int) -> int:
    """Rounded up to whole units, so that the memory counted is enough."""
    return -(-size // unit) * unit


class ModelFacts(NamedTuple):
    """The model facts that resolving needs. `weight_bytes` is the size of its files, with expanded types at their loaded size
    where `expansion` says so (on a CPU); `stored` are the tensor types of a GGUF file."""

    arch: ArchSpec
    name: str
    weight_bytes: int
    expansion: Decision | None = None
    stored: Stored | None = None


class Prepared(NamedTuple):
    """A resolved configuration, its decisions, and the facts it was made from."""

    config: EngineConfig
    decisions: list[Decision]
    model: ModelFacts
    device: DeviceFacts


def prepare(config: EngineConfig, *, device: DeviceFacts | None = None) -> Prepared:
    """Finds the model, reads its header and the machine, and resolves. Raises ConfigError or ModelError."""
    facts = read_model(config)
    device = device or read_device()
    resolved, decisions = resolve(config, facts, device)
    return Prepared(resolved, decisions, facts, device)


def read_model(config: EngineConfig) -> ModelFacts:
    """Facts from the headers of the model's files; no weight is read. Raises ModelError."""
    files = files_of(config.model)
    return ModelFacts(read_arch(files), files.name, *stored_bytes(files), stored_of(files))


def resolve(
    config: EngineConfig, model: ModelFacts, device: DeviceFacts, *, fitting: bool = True
) -> tuple[EngineConfig, list[Decision]]:
    """The resolved configuration and its Decisions. Raises ConfigError with the numbers that would have worked; with `fitting`,
    also for a configuration that does not fit into this machine's memory."""
    work = _Resolver(config, model, device)
    work.computes_on()
    work.step_size()
    work.mesh()
    work.types()
    work.memory()
    work.length()
    work.reuse()
    work.queue()
    work.latency()
    work.places()
    if fitting and not work.is_on_gpu:
        check_memory(work.config, model.arch, work.weight_bytes(), device)
    if fitting:
        check_slots(work.config)
    return work.config, work.decisions


class _Resolver:
    """The configuration while it is resolved, group by group; later groups build on earlier ones."""

    def __init__(self, config: EngineConfig, model: ModelFacts, device: DeviceFacts) -> None:
        self.config = config
        self.arch, self.name = model.arch, model.name
        self.model = model
        self.device = device
        self.decisions: list[Decision] = []
        parallel = config.parallel
        self.shape = Mesh(parallel.dp, parallel.pp, parallel.tp)
        self.num_workers = parallel.dp * parallel.pp * parallel.tp
        self.has_layers = self.arch.family != "stub" and parallel.worker != "fake"

    def decide(self, group: str, because: str, shown: str = "", **value: Any) -> None:
        """Sets one field of a group and records why."""
        ((field, chosen),) = value.items()
        part = msgspec.structs.replace(getattr(self.config, group), **value)
        self.config = msgspec.structs.replace(self.config, **{group: part})
        self.decisions.append(Decision(field.replace("_", "-"), shown or str(chosen), because))

    def computes_on(self) -> None:
        """Chooses the device. Raises ConfigError when a GPU was requested and cannot be used."""
        choice = choose_device(self.config, self.arch, self.device)
        if choice.value == "cpu":
            refuse_on_cpu(self.config, choice)
        if self.config.parallel.device == "auto":
            self.decide("parallel", choice.because, device=choice.value)
        model = self.model
        expansion = expansion_of(self.config.model, self.arch, model.stored) if self.is_on_gpu else model.expansion
        self.decisions += [] if expansion is None else [expansion]

    def step_size(self) -> None:
        """Chooses the size of a step: a GPU computes many tokens in the time of one."""
        scheduler, where = self.config.scheduler, "a GPU" if self.is_on_gpu else "a CPU"
        if scheduler.max_num_seqs is None:
            self.decide("scheduler", f"{where} computes", max_num_seqs=GPU_ROWS if self.is_on_gpu else CPU_ROWS)
        if scheduler.max_num_tokens is None:
            most = max(GPU_TOKENS if self.is_on_gpu else CPU_TOKENS, 2 * self.config.scheduler.num_rows)
            because = (
                "a GPU is busy only with many" if self.is_on_gpu else "more are no faster, and first tokens would wait"
            )
            self.decide("scheduler", because, max_num_tokens=most)
        graph_sizes(self.config.parallel.graph_sizes, self.config.scheduler.num_rows)

    def latency(self) -> None:
        """Chooses the target between tokens. Raises ConfigError for targets that are none."""
        scheduler = self.config.scheduler
        ttft_target(scheduler.ttft_target)
        parallel = self.config.parallel
        copy = gpu_weight_bytes(self.config.model, self.arch, self.model.stored) if self.is_on_gpu else 0
        seconds, because = automatic_itl_target(copy // (parallel.tp * parallel.pp), is_on_gpu=self.is_on_gpu)
        targets = itl_targets(scheduler.itl_target, seconds)
        named = [part.strip() for part in scheduler.itl_target.split(",")]
        if AUTO in named or all("=" in part for part in named):
            rest = [part for part in named if part != AUTO]
            own = ",".join([f"{SOFT}{targets['default'] * 1e3:.3g}ms", *rest])
            self.decide("scheduler", because, shown=f"about {format_seconds(targets['default'])}", itl_target=own)

    @property
    def is_on_gpu(self) -> bool:
        return self.config.parallel.worker_kind == "cuda"

    def mesh(self) -> None:
        """Rejects a tp or pp that the model cannot be split into, and reports an uneven split."""
        tp, pp = self.shape.tp, self.shape.pp
        if self.num_workers > 1 and self.device.cores < self.num_workers and self.device.num_gpus == 0:
            because = f"{self.num_workers} workers on {self.device.cores} cores take turns"
            self.decisions.append(Decision("cores", str(self.device.cores), because))
        if not self.has_layers:
            return
        arch = self.arch
        heads = [split_heads(arch.num_heads, arch.num_kv_heads, tp, rank) for rank in range(tp)]
        split_evenly(arch.ffn, tp, 0, unit=FFN_UNIT if arch.ffn % FFN_UNIT == 0 else 1)
        if pp > arch.num_layers:
            raise ConfigError(
                f"--pp is {pp}; the model has {arch.num_layers} layers", hint=f"--pp {arch.num_layers} or less"
            )
        if tp > 1:
            sizes = " + ".join(str(head.kv.size) for head in heads)
            how = "each KV head is kept by several workers" if heads[0].replicated else f"KV heads split {sizes}"
            self.decisions.append(Decision("tp", str(tp), how))
        if pp > 1:
            sizes = " + ".join(
                str(self.shape._replace(pp_rank=rank).layers(arch.num_layers).size) for rank in range(pp)
            )
            self.decisions.append(Decision("pp", str(pp), f"layers split {sizes}"))

    def types(self) -> None:
        """Chooses the served name and the types of weights and KV cache."""
        model, cache, stored = self.config.model, self.config.cache, self.arch.weights_dtype
        if model.served_name is None:
            self.decide("model", "the model's own name", served_name=self.name)
        if self.is_on_gpu:
            self.gpu_types()
            return
        if model.dtype == "auto" and stored in DTYPE_BYTES:
            self.decide("model", "as stored", dtype=stored)
        elif model.dtype == "auto":
            self.decisions.append(Decision("dtype", stored, "blocks stay as stored, dense tensors too"))
        if cache.kv_dtype == "auto":
            dtype = self.config.model.dtype
            fits = self.arch.head_dim % 2 == 0 and cache.block_size % 2 == 0
            packed = "int16" if fits else "float16"
            chosen = dtype if dtype in DTYPE_BYTES else packed
            because = {
                "int16": "half of float32, as exact as float16 and faster",
                "float16": "half the memory of float32",
            }
            self.decide("cache", "as the weights" if dtype in DTYPE_BYTES else because[packed], kv_dtype=chosen)

    def gpu_types(self) -> None:
        """16-bit types for everything: the GPU kernels support nothing else."""
        dtype, stored = compute_dtype(self.config, self.arch), self.arch.weights_dtype
        if self.config.model.dtype == "auto":
            because = "as stored" if dtype == stored else f"the weights are {stored}; the GPU computes in 16 bits"
            self.decide("model", because, dtype=dtype)
        if self.config.cache.kv_dtype == "auto":
            self.decide("cache", "as the weights", kv_dtype=dtype)

    def memory(self) -> None:
        """Chooses kv_memory on machines whose memory is known before loading (CPU)."""
        cache = self.config.cache
        if self.is_on_gpu:
            return
        weight_bytes = self.weight_bytes()
        if weight_bytes > self.device.memory_total:
            raise ConfigError(
                f"the weights take {format_bytes(weight_bytes)}; this machine has "
                f"{format_bytes(self.device.memory_total)} of memory",
                hint="use a smaller or more strongly quantized model",
            )
        if cache.kv_memory is not None or cache.num_blocks is not None:
            return
        if not self.has_layers:
            rows = self.wanted_len() * self.config.scheduler.num_rows
            blocks = min(-(-rows // cache.block_size), MOST_FREE_BLOCKS)
            self.decide("cache", "blocks of a model without layers cost nothing", num_blocks=blocks)
            return
        left = max(self.device.memory_free - weight_bytes * self.shape.dp, 0)
        room = room_for_kv(self.config, self.arch, weight_bytes, self.device) // self.num_workers
        share = min(int(left * KV_SHARE) // self.num_workers, room)
        row = self.token_bytes() * _in_units(self.wanted_len(), cache.block_size)
        useful = _in_units(row * self.config.scheduler.num_rows, MIB)
        needed = 0 if self.config.model.max_len is None else _in_units(row, MIB)
        size = max(min(share, KV_LARGEST // self.shape.num_workers, useful), min(needed, room))
        size = max(size // MIB, 1) * MIB
        tokens = size // self.token_bytes()
        because = f"of {format_bytes(left)} left beside the weights; holds {tokens} tokens"
        self.decide("cache", because, format_bytes(size), kv_memory=f"{size // MIB}MiB")

    def weight_bytes(self) -> int:
        """Bytes of one copy of the weights as loaded by a CPU."""
        return loaded_bytes(self.config.model, self.arch, self.model.weight_bytes)

    def length(self) -> None:
        """Chooses max_len, or checks it against the model and the KV memory."""
        asked, longest = self.config.model.max_len, self.arch.max_position
        if asked is not None and self.has_layers and asked > longest:
            raise ConfigError(
                f"--max-len is {asked}; the model's positions end at {longest}", hint=f"--max-len {longest}"
            )
        fits = self.kv_tokens()
        if asked is not None:
            if fits is not None and asked > fits:
                raise too_little_kv(asked, fits, self.token_bytes())
            return
        if fits is None or fits >= longest:
            self.decide("model", "the model's own limit", max_len=longest)
        elif fits > 0:
            self.decide("model", f"what the KV memory holds; the model could {longest}", max_len=fits)
        else:
            raise too_little_kv(longest, 0, self.token_bytes())

    def reuse(self) -> None:
        """Disables the prefix cache where rotation depends on the prompt's length: equal prefixes would not have equal keys."""
        rope, longest = self.arch.rope, self.config.model.max_len or self.arch.max_position
        varies = rope.kind in ("dynamic", "longrope") and longest > rope.original_max_position
        if varies and self.config.cache.prefix_cache:
            self.decide("cache", f"{rope.kind} rotates prompts by their length", prefix_cache=False)

    def queue(self) -> None:
        """Chooses the token budget where prompts are not chunked, and the queue limits."""
        scheduler, max_len = self.config.scheduler, self.config.model.max_len or 1
        if scheduler.chunk == 0 and scheduler.num_tokens < max_len:
            self.decide("scheduler", "prompts are not cut, so one step must hold the longest", max_num_tokens=max_len)
            scheduler = self.config.scheduler
        if scheduler.max_waiting is None:
            self.decide("scheduler", "4 x max-num-seqs", max_waiting=4 * scheduler.num_rows)
        if scheduler.max_waiting_tokens is None:
            because = "8 x the larger of max-num-tokens and max-len, at least 16384"
            self.decide("scheduler", because, max_waiting_tokens=scheduler.queue_tokens(max_len))

    def places(self) -> None:
        """Chooses where workers run and their number of threads."""
        parallel, per_engine = self.config.parallel, self.shape.num_workers
        fleet_of(self.config)
        if self.config.in_lockstep:
            self.check_experts()
        elif parallel.ep:
            self.decisions.append(Decision("ep", "off", "one engine has all experts"))
        if parallel.sequence_parallel:
            self.check_sequence()
        if parallel.executor == "auto":
            if per_engine == 1:
                self.decide("parallel", "one worker: it runs inside the engine process", executor="inproc")
            else:
                self.decide("parallel", f"{per_engine} workers: a process each", executor="procs")
        elif parallel.executor == "inproc" and per_engine > 1:
            raise ConfigError(f"--executor inproc runs one worker; tp x pp is {per_engine}", hint="--executor procs")
        if parallel.threads is None:
            threads = max(1, self.device.cores // self.num_workers)
            because = f"{self.device.cores} cores over {self.num_workers} worker{'s' * (self.num_workers > 1)}"
            self.decide("parallel", because, threads=threads)
        check_threads(self.config, self.device)

    def check_sequence(self) -> None:
        """Rejects sequence parallelism where it is not supported."""
        tp = self.config.parallel.tp
        if not self.is_on_gpu:
            raise ConfigError("--sequence-parallel splits hidden states over GPUs", hint="leave it out")
        value = f"{tp} parts" if tp > 1 else "off"
        because = "of prompts' hidden states" if tp > 1 else "one worker has all of a layer"
        self.decisions.append(Decision("sequence-parallel", value, because))

    def check_experts(self) -> None:
        """Rejects expert parallelism for models without experts, or where it is not supported."""
        parallel, per_engine, body = self.config.parallel, self.shape.num_workers, self.arch.body
        if per_engine > 1:
            raise ConfigError(f"--ep joins engines of one worker each; tp x pp is {per_engine}", hint="--dp instead")
        if parallel.worker == "fake":
            return
        if self.is_on_gpu or not isinstance(body, MoeBody):
            where = "a GPU" if self.is_on_gpu else f"{self.arch.family} models"
            raise ConfigError(f"--ep: the experts of {where} cannot be split over engines", hint="leave --ep out")
        if body.num_experts < parallel.dp:
            raise ConfigError(
                f"--ep: {body.num_experts} experts cannot be split over {parallel.dp} engines",
                hint=f"--dp {body.num_experts} or less",
            )
        self.decisions.append(
            Decision(
                "ep", str(parallel.dp), f"{body.num_experts} experts over {parallel.dp} engines, which step together"
            )
        )

    def token_bytes(self) -> int:
        """KV bytes per token on the worker that holds the most; 1 for models without KV."""
        if not self.has_layers:
            return 1
        return kv_token_bytes(self.arch, self.config.cache.kv_dtype, self.shape)

    def wanted_len(self) -> int:
        return self.config.model.max_len or self.arch.max_position

    def kv_tokens(self) -> int | None:
        """Tokens that the KV blocks of one engine hold, or None while that is unknown."""
        cache = self.config.cache
        if cache.num_blocks is not None:
            return cache.num_blocks * cache.block_size
        if cache.kv_memory is None or not self.has_layers:
            return None
        return parse_bytes(cache.kv_memory) // (self.token_bytes() * cache.block_size) * cache.block_size


def describe(arch: ArchSpec) -> str:
    """One-line summary of a model: `llama, 135 M parameters, 30 layers`."""
    count = num_params(arch)
    size = f"{count / 1e9:.3g} G" if count >= 1e9 else f"{count / 1e6:.3g} M"
    return f"{arch.family}, {size} parameters, {arch.num_layers} layers"
