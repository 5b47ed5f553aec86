"""`trireme plan`: whether a model fits on this machine, its memory shares, and the flags to start it with.

Reads the model's header and the machine; loads no weight and imports no tensor library.
"""

from __future__ import annotations

import json
import shlex
import sys
from typing import Any, NamedTuple

import msgspec

from trireme.config import Decision, EngineConfig
from trireme.errors import ConfigError
from trireme.launch.options import Invocation, off_flag
from trireme.machine.device import DeviceFacts, GpuFacts, read_device, read_gpu
from trireme.machine.fits import check_slots, free_for, kv_tokens_of, shares_on_host, shortage
from trireme.machine.gpu_formats import gpu_weight_bytes
from trireme.machine.memory_budget import MemoryLine, gpu_shares, kv_token_bytes, too_little_kv
from trireme.machine.step_costs import ExpectedSteps, expected_steps, rates_of, rough_costs
from trireme.machine.weight_bytes import loaded_bytes
from trireme.resolve import ModelFacts, describe, read_model, resolve
from trireme.settings import SECRET, table
from trireme.sizes import MIB, format_bytes, format_seconds
from trireme.topology.mesh import Mesh

LENGTHS = tuple(1 << power for power in range(10, 21))


class Context(NamedTuple):
    """Cost of requests of one length, and how many of them the KV cache of all engines holds at once."""

    tokens: int
    kv_bytes: int
    at_once: int


class Plan(NamedTuple):
    """The answer. `refusal` says why it does not fit ("" when it does) and `cures` what to type instead; when the requested
    settings were refused, the rest describes them without the requested length and KV memory."""

    asked: EngineConfig
    config: EngineConfig  # as resolved
    decisions: list[Decision]
    shares: list[MemoryLine]
    contexts: list[Context]
    largest_len: int  # longest request that the KV memory holds, within the model's positions
    possible_len: int  # the same if KV got all free memory
    refusal: str
    cures: list[str]
    steps: ExpectedSteps | None  # rough; None for test models

    @property
    def total(self) -> int:
        return sum(share.total for share in self.shares)


def run(invocation: Invocation) -> int:
    """Prints the plan; exit status 0 when it fits, 1 when it does not."""
    config = invocation.loaded.config
    model, device = read_model(config), read_device()
    gpu = read_gpu() if device.num_gpus else None
    plan = make_plan(config, model, device, gpu)
    if gpu is not None and plan.config.parallel.worker_kind == "cuda":
        device = _with_memory_of(device, gpu)
    if invocation.options["json"]:
        print(json.dumps(_document(plan, model, device), indent=1))
    else:
        _print(plan, model, device)
    return 1 if plan.refusal else 0


def make_plan(config: EngineConfig, model: ModelFacts, device: DeviceFacts, gpu: GpuFacts | None = None) -> Plan:
    """Resolves as a start would and adds up, on the GPU `gpu` if that computes. Raises ConfigError only for problems that no
    length or KV memory can fix, and for a GPU that does not report its memory."""
    refusal, cures = "", list[str]()
    try:
        resolved, decisions = resolve(config, model, device, fitting=False)
    except ConfigError as error:
        refusal, cures = error.message, [line for line in error.hint.split("\n") if line]
        resolved, decisions = resolve(_without_sizes(config), model, device, fitting=False)
    is_on_gpu = resolved.parallel.worker_kind == "cuda"
    if is_on_gpu:
        if gpu is None:
            raise ConfigError("nvidia-smi says nothing of the GPU's memory", hint="--device cpu")
        device, resolved = _with_memory_of(device, gpu), _sized_for(resolved, model, gpu)
    mesh = Mesh(config.parallel.dp, config.parallel.pp, config.parallel.tp)
    has_kv = model.arch.family != "stub" and config.parallel.worker != "fake"
    token_bytes = kv_token_bytes(model.arch, resolved.cache.kv_dtype, mesh) if has_kv else 0
    held = kv_tokens_of(resolved, token_bytes)
    if is_on_gpu:
        weights = _weights_of_gpu(resolved, model)
        shares = gpu_shares(resolved, model.arch, weights, held * token_bytes)
    else:
        weights = loaded_bytes(resolved.model, model.arch, model.weight_bytes)
        shares = shares_on_host(resolved, model.arch, weights)
    available = free_for(shares, device)
    over = sum(share.total for share in shares) - available
    workers = 1 if is_on_gpu else mesh.dp * mesh.num_workers
    if is_on_gpu and not refusal and held < (resolved.model.max_len or 1):
        shortage = too_little_kv(resolved.model.max_len or 1, held, token_bytes)
        refusal, cures = shortage.message, shortage.hint.split("\n")[:1]
    if not refusal:
        refusal, cures = _lacking(resolved, shares, available)
    free = max(0, held * token_bytes * workers - over)  # for KV, with everything else allocated
    positions, size = model.arch.max_position, resolved.cache.block_size
    possible = free // max(token_bytes * workers * size, 1) * size if token_bytes else held
    contexts = [Context(n, n * token_bytes, mesh.dp * (held // n)) for n in LENGTHS if n < positions and n <= held]
    if held >= positions:
        contexts.append(Context(positions, positions * token_bytes, mesh.dp * (held // positions)))
    largest, possible = min(held, positions), min(possible, positions)
    steps = None
    if has_kv:
        rates = rates_of(device, is_on_gpu=is_on_gpu)
        costs = rough_costs(model.arch, weights, token_bytes, mesh.num_workers, rates)
        rows = min(resolved.scheduler.num_rows, max(1, held // 1024))
        steps = expected_steps(costs, rows, resolved.scheduler.num_tokens)
    return Plan(config, resolved, decisions, shares, contexts, largest, possible, refusal, cures, steps)


def _lacking(config: EngineConfig, shares: list[MemoryLine], free: int) -> tuple[str, list[str]]:
    """Why a resolved configuration does not fit, and the cures, as a start would report them."""
    try:
        if (refusal := shortage(config, shares, free)) is not None:
            raise refusal
        check_slots(config)
    except ConfigError as error:
        return error.message, error.hint.split("\n")
    return "", []


def _with_memory_of(device: DeviceFacts, gpu: GpuFacts) -> DeviceFacts:
    return msgspec.structs.replace(device, memory_free=gpu.memory_free, memory_total=gpu.memory_total, memory_held=0)


def _weights_of_gpu(config: EngineConfig, model: ModelFacts) -> int:
    """Approximate weight bytes per GPU: every GPU of an engine has an equal share."""
    return -(-gpu_weight_bytes(config.model, model.arch, model.stored) // (config.parallel.tp * config.parallel.pp))


def _sized_for(config: EngineConfig, model: ModelFacts, gpu: GpuFacts) -> EngineConfig:
    """The configuration with the KV memory that a worker on the GPU will find, where none was requested."""
    cache = config.cache
    if cache.kv_memory is not None or cache.num_blocks is not None:
        return config
    weights = _weights_of_gpu(config, model)
    taken = gpu.memory_total - gpu.memory_free + sum(s.total for s in gpu_shares(config, model.arch, weights, 0))
    left = max(int(gpu.memory_total * cache.gpu_memory) - taken, 0)
    return msgspec.structs.replace(config, cache=msgspec.structs.replace(cache, kv_memory=f"{left // MIB}MiB"))


def _without_sizes(config: EngineConfig) -> EngineConfig:
    model = msgspec.structs.replace(config.model, max_len=None)
    cache = msgspec.structs.replace(config.cache, kv_memory=None, num_blocks=None)
    return msgspec.structs.replace(config, model=model, cache=cache)


def suggested_flags(plan: Plan) -> list[str]:
    """Flags that start this plan again, whatever is free by then: the requested ones, and the sizes that were chosen."""
    words = []
    for setting in table():
        value = getattr(getattr(plan.config, setting.group), setting.name)
        was_asked = getattr(getattr(plan.asked, setting.group), setting.name) != setting.default
        if value == setting.default or setting.name in ("model", *SECRET):
            continue
        if not was_asked and setting.name not in ("max_len", "kv_memory", "kv_dtype"):
            continue
        if setting.kind == "switch":
            words.append(setting.flag if value else off_flag(setting))
        else:
            words += [setting.flag, str(value)]
    return words


# ---------------------------------------------------------------- output


def _print(plan: Plan, model: ModelFacts, device: DeviceFacts) -> None:
    from trireme.launch.console import Console

    console = Console(sys.stdout)
    size = f", {format_bytes(model.weight_bytes)}" if model.weight_bytes else ""
    console.title(f"plan {model.name}  ({describe(model.arch)}{size})", f"{device.cores} cores {device.cpu}")
    console.decisions(plan.decisions)
    console.say("")
    rows = [[s.what, str(s.holders), format_bytes(s.each), format_bytes(s.total)] for s in plan.shares]
    rows.append(["needed", "", "", format_bytes(plan.total)])
    rows.append(
        ["free now", "", "", f"{format_bytes(free_for(plan.shares, device))} of {format_bytes(device.memory_total)}"]
    )
    console.table(["memory", "holders", "each", "in all"], rows)
    console.say("")
    if plan.contexts:
        cells = [[str(c.tokens), format_bytes(c.kv_bytes), str(c.at_once)] for c in plan.contexts]
        console.table(["request, tokens", "KV cache", "at once"], cells)
        console.say("")
    if plan.steps is not None:
        one, full, count, prompt = plan.steps
        console.say(
            f"steps, roughly: {format_seconds(one)} for one stream, {format_seconds(full)} for {count} at 1024 tokens, "
            f"{format_seconds(prompt)} for a prompt of 2048"
        )
    console.say(_length_line(plan, model))
    if plan.refusal:
        console.say(f"does not fit: {plan.refusal}", style="bold red")
        for i, cure in enumerate(plan.cures):
            console.say(f"  {'try' if i == 0 else 'or ':<5} {cure}")
        return
    console.say(f"fits, with {format_bytes(free_for(plan.shares, device) - plan.total)} to spare", style="bold green")
    console.say("  " + shlex.join(["trireme", "serve", plan.config.model.model, *suggested_flags(plan)]))


def _length_line(plan: Plan, model: ModelFacts) -> str:
    text = f"largest context {plan.largest_len} tokens"
    if plan.largest_len == model.arch.max_position:
        return text + ", the model's own limit"
    return f"{text}; with all free memory for KV {plan.possible_len}; the model could {model.arch.max_position}"


def _document(plan: Plan, model: ModelFacts, device: DeviceFacts) -> dict[str, Any]:
    return {
        "model": model.name,
        "fits": not plan.refusal,
        "refusal": plan.refusal,
        "cures": plan.cures,
        "memory": [{**share._asdict(), "total": share.total} for share in plan.shares],
        "needed": plan.total,
        "machine": msgspec.to_builtins(device),
        "contexts": [context._asdict() for context in plan.contexts],
        "steps": plan.steps._asdict() if plan.steps is not None else None,
        "largest_len": plan.largest_len,
        "possible_len": plan.possible_len,
        "decisions": [{"what": d.what, "value": d.value, "because": d.because} for d in plan.decisions],
        "flags": suggested_flags(plan),
    }
