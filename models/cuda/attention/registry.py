"""Attention kernels for NVIDIA GPUs: their capabilities, availability, and the fastest for a model on this GPU.

KERNELS lists the kernels of each path (those of models.cuda.attention.prefill_plan, and `decode` for single tokens). Capable
ones are tried once at startup on the model's shapes: a result that differs from the first kernel's, or an error, excludes a
kernel. `AttentionChoice.decisions` reports the choice and its reasons.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Container, Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from trireme.models.cuda.attention.prefill import PromptAttention, Prompts, gather
from trireme.models.cuda.attention.prefill_plan import Rules, plan_prompts
from trireme.models.cuda.ops import CudaPagedKV

AttentionPath: TypeAlias = Literal["decode", "pieces", "fresh", "whole"]
HALF = (torch.float16, torch.bfloat16)
EIGHTHS = range(8, 257, 8)  # head dims
POWERS = (16, 32, 64, 128, 256)
LENGTHS = (128, 512, 1024, 4096)  # prompt lengths of the trials
LEAST_WHOLE = 1024  # shorter squares are not worth a launch each
TOKENS = 4096  # tokens per trial
UNTRIED = float("inf")
CLOSE = 0.02  # relative error between two kernels in 16 bits, by norm


class Need(NamedTuple):
    """Attention features that a model needs."""

    dtype: torch.dtype
    dim: int
    window: int = 0  # the shortest sliding window of its layers
    softcap: bool = False
    sinks: bool = False
    fp8_cache: bool = False


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel of one path. `load` returns its function, of the path's Run type in prefill.py; it may raise."""

    name: str
    path: AttentionPath
    load: Callable[[], Any]
    dims: Container[int] = EIGHTHS
    has_windows: bool = True
    has_softcap: bool = False
    has_sinks: bool = False
    has_fp8: bool = True  # float8 caches, for paths that read the cache
    package: str = ""  # required package
    needs_copies: bool = False  # of a size that depends on the step: cannot be captured in a graph

    def lacks(self, need: Need) -> str:
        """Why it cannot serve `need`; empty if it can. `whole` and `fresh` read computed keys, not cached ones."""
        wants = {
            f"heads of {need.dim}": need.dim not in self.dims,
            str(need.dtype): need.dtype not in HALF,
            "windows": need.window and not self.has_windows,
            "soft caps": need.softcap and not self.has_softcap,
            "sinks": need.sinks and not self.has_sinks,
            "caches of fp8": need.fp8_cache and not self.has_fp8,
        }
        missing = [what for what, is_so in wants.items() if is_so]
        if missing:
            return "no " + ", ".join(missing)
        if self.package and importlib.util.find_spec(self.package) is None:
            return "not installed"
        return ""


# ---------------------------------------------------------------- the kernels


def _flash() -> Any:
    """torch's FlashAttention 2 over packed prompts; torch.nn.attention.varlen wraps the same kernel with more overhead."""
    forward = torch.ops.aten._flash_attention_forward

    def run(q: Tensor, k: Tensor, v: Tensor, start: Tensor, longest: int, scale: float, window: int) -> Tensor:
        left, right = (window - 1, 0) if window else (None, None)
        sizes = (start, start, longest, longest)
        found: Tensor = forward(
            q, k, v, *sizes, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=right
        )[0]
        return found

    return run


def _flash_package(name: str) -> Callable[[], Any]:
    """FlashAttention 2 or 3 from its own package."""

    def load() -> Any:
        varlen = importlib.import_module(name).flash_attn_varlen_func

        def run(q: Tensor, k: Tensor, v: Tensor, start: Tensor, longest: int, scale: float, window: int) -> Tensor:
            reach = (window - 1, 0) if window else (-1, -1)
            sizes = (start, start, longest, longest)
            found = varlen(q, k, v, *sizes, softmax_scale=scale, causal=True, window_size=reach)
            return found[0] if isinstance(found, tuple) else found

        return run

    return load


def _cudnn() -> Any:
    forward = torch.ops.aten._scaled_dot_product_cudnn_attention

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        found: Tensor = forward(q, k, v, None, False, 0.0, True, False, scale=scale)[0]
        return found

    return run


def _flashinfer() -> Any:
    single = importlib.import_module("flashinfer").single_prefill_with_kv_cache

    def run(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        squares = [
            single(*(x.transpose(0, 1) for x in one), causal=True, sm_scale=scale) for one in zip(q, k, v, strict=True)
        ]
        return torch.stack(squares).transpose(1, 2)

    return run


def _triton() -> Any:
    from trireme.models.cuda.attention.triton_prefill import piece_attention

    def run(
        qkv: Tensor,
        q_heads: int,
        cache: CudaPagedKV,
        prompts: Prompts,
        scale: float,
        window: int,
        out: Tensor,
        softcap: float = 0.0,
        sinks: Tensor | None = None,
    ) -> Tensor:
        columns = (prompts.table, prompts.places, prompts.firsts, prompts.bounds, prompts.contexts)
        most = prompts.most_queries or prompts.plan.num_queries
        return piece_attention(
            qkv,
            q_heads,
            cache,
            *columns,
            scale,
            out,
            most_queries=most,
            window=window,
            softcap=softcap,
            sinks=sinks,
        )

    return run


def _gathered() -> Any:
    """torch's FlashAttention over gathered copies of each piece's context."""
    forward = torch.ops.aten._flash_attention_forward

    def run(
        qkv: Tensor, q_heads: int, cache: CudaPagedKV, prompts: Prompts, scale: float, window: int, out: Tensor
    ) -> Tensor:
        _, _, block_size, dim = cache.k.shape
        where, plan = gather(prompts, block_size), prompts.plan
        k, v = (_tokens_of(x, unit, where.block, where.offset, qkv.dtype) for x, unit in cache.sides)
        q = qkv[:, : q_heads * dim].index_select(0, where.tokens).unflatten(1, (q_heads, dim))
        longest = int((plan.piece_bounds[1:] - plan.piece_bounds[:-1]).max())
        sizes = (prompts.bounds, where.context_start, longest, int(plan.piece_context.max()))
        left, right = (window - 1, 0) if window else (None, None)
        found = forward(q, k, v, *sizes, 0.0, True, False, scale=scale, window_size_left=left, window_size_right=right)[
            0
        ]
        return out.index_copy_(0, where.tokens, found.flatten(1))

    return run


def _tokens_of(cache: Tensor, unit: float, block: Tensor, offset: Tensor, dtype: torch.dtype) -> Tensor:
    """Keys or values [N, Hk, D] of the tokens at (block, offset), in `dtype`; `unit` is the scale of a float8 cache."""
    if cache.dtype == dtype:
        return cache.transpose(1, 2)[block, offset]
    found = cache.view(torch.uint8).transpose(1, 2)[block, offset].view(cache.dtype).to(dtype)
    return found if unit == 1.0 else found.mul_(unit)


KERNELS: tuple[Kernel, ...] = (
    # The first kernel of a path is the reference for the others' results.
    Kernel("own kernel", "decode", lambda: None, (64, 80, 96, 128, 256), has_softcap=True, has_sinks=True),
    Kernel("torch flash", "fresh", _flash),
    Kernel("flash_attn 3", "fresh", _flash_package("flash_attn_interface"), package="flash_attn_interface"),
    Kernel("flash_attn 2", "fresh", _flash_package("flash_attn"), package="flash_attn"),
    Kernel("cuDNN", "whole", _cudnn, range(8, 129, 8)),
    Kernel("FlashInfer", "whole", _flashinfer, (64, 128, 256), package="flashinfer"),
    Kernel("torch flash over copies", "pieces", _gathered, needs_copies=True),
    Kernel("Triton", "pieces", _triton, POWERS, has_softcap=True, has_sinks=True, package="triton"),
)


def candidates(path: AttentionPath, need: Need) -> tuple[list[Kernel], list[str]]:
    """(kernels of `path` that can serve `need`, reasons why the others cannot)."""
    mine = [kernel for kernel in KERNELS if kernel.path == path]
    reasons = [kernel.lacks(need) for kernel in mine]
    fit = [kernel for kernel, why in zip(mine, reasons, strict=True) if not why]
    return fit, [f"{kernel.name}: {why}" for kernel, why in zip(mine, reasons, strict=True) if why]


# ---------------------------------------------------------------- trials


class AttentionTrial:
    """Inputs of `tokens` tokens in prompts of one length, for every path."""

    def __init__(
        self, length: int, need: Need, q_heads: int, kv_heads: int, *, tokens: int = TOKENS, block_size: int = 16
    ) -> None:
        count, dim = tokens // length, need.dim
        self.need, self.q_heads, self.scale = need, q_heads, dim**-0.5
        self._whole_rules, self._fresh_rules = Rules(whole_from=1), Rules(packs_fresh=True)
        self.qkv = torch.randn(tokens, (q_heads + 2 * kv_heads) * dim, device="cuda").to(need.dtype)
        self.out = torch.empty(tokens, q_heads * dim, device="cuda", dtype=need.dtype)
        k, v = self.qkv.unflatten(1, (-1, dim))[:, q_heads:].split(kv_heads, 1)
        dtype = torch.float8_e4m3fn if need.fp8_cache else need.dtype
        paged = (x.unflatten(0, (-1, block_size)).transpose(1, 2).contiguous().to(dtype) for x in (k, v))
        self.cache = CudaPagedKV(*paged)
        self.table = torch.arange(tokens // block_size, device="cuda", dtype=torch.int32).view(count, -1)
        self.counts = torch.full((count,), length, dtype=torch.int32).numpy()

    def prompts(self, rules: Rules) -> Prompts:
        plan = plan_prompts(self.counts, 0 * self.counts, rules)
        return Prompts.of(plan, self.table, (torch.from_numpy(column).cuda() for column in plan.columns))

    def attention(self, path: AttentionPath, run: Any) -> PromptAttention:
        """A PromptAttention that sends everything to the kernel `run` of the path `path`."""
        if path == "whole":
            return PromptAttention(self._whole_rules, _nothing, whole=run)
        if path == "fresh":
            return PromptAttention(self._fresh_rules, _nothing, fresh=run)
        return PromptAttention(Rules(), run)

    def launch(self, attention: PromptAttention, window: int = 0) -> Callable[[], Tensor]:
        prompts = self.prompts(attention.rules)
        return lambda: attention(self.qkv, self.q_heads, self.cache, prompts, self.scale, window, self.out)

    def run(self, path: AttentionPath, run: Any) -> tuple[Tensor, float]:
        """(float32 result, microseconds of a launch)."""
        launch = self.launch(self.attention(path, run), 0 if path == "whole" else self.need.window)
        found = launch().float()
        return found, min(_us(launch) for _ in range(3))


def _nothing(*_: object) -> None:
    """Piece kernel for trials of other paths, which leave no pieces."""


def _us(launch: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(3):
        launch()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) * 1e3 / 3


class KernelTiming(NamedTuple):
    """Microseconds of a kernel for each of LENGTHS, UNTRIED if not tried; or why it was excluded."""

    kernel: Kernel
    us: tuple[float, ...]
    why_not: str = ""

    @property
    def total(self) -> float:
        return sum(us for us in self.us if us != UNTRIED)

    def __str__(self) -> str:
        return f"{self.kernel.name} {' '.join('-' if us == UNTRIED else f'{us:.0f}' for us in self.us)}"


def try_kernels(need: Need, q_heads: int, kv_heads: int) -> tuple[list[KernelTiming], list[str]]:
    """Times every kernel that can serve a model's prompts on this GPU; also returns the excluded ones with reasons."""
    fit: list[Kernel] = []
    out: list[str] = []
    for path in ("fresh", "whole", "pieces"):
        kernels, reasons = candidates(path, need)
        fit, out = fit + kernels, out + reasons
    trials = [AttentionTrial(length, need, q_heads, kv_heads) for length in LENGTHS]
    expected: Truths = {}
    found = [_tried(kernel, trials, expected) for kernel in fit]
    torch.cuda.empty_cache()
    return [timing for timing in found if not timing.why_not], [
        *out,
        *(f"{timing.kernel.name}: {timing.why_not}" for timing in found if timing.why_not),
    ]


Truths: TypeAlias = dict[tuple[int, bool], Tensor]
"""The reference result by (trial index, whether it was read from a float8 cache)."""


def _tried(kernel: Kernel, trials: list[AttentionTrial], expected: Truths) -> KernelTiming:
    times = []
    try:
        run = kernel.load()
        for i, trial in enumerate(trials):
            if kernel.path == "whole" and not LEAST_WHOLE <= LENGTHS[i] <= (trial.need.window or LENGTHS[-1]):
                times.append(UNTRIED)
                continue
            found, us = trial.run(kernel.path, run)
            times.append(us)
            truth = expected.setdefault((i, trial.need.fp8_cache and kernel.path == "pieces"), found)
            if not float((found - truth).norm() / truth.norm()) < CLOSE:
                return KernelTiming(kernel, (), f"differs from the first for prompts of {LENGTHS[i]}")
    except Exception as error:  # libraries raise anything; the other kernels remain
        return KernelTiming(kernel, (), f"{type(error).__name__}: {error}".splitlines()[0][:120])
    return KernelTiming(kernel, tuple(times))


# ---------------------------------------------------------------- the choice


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen kernels; `pieces` can compute everything."""

    rules: Rules
    pieces: KernelTiming
    fresh: KernelTiming | None
    whole: KernelTiming | None
    left_out: tuple[str, ...]

    @property
    def fits_graphs(self) -> bool:
        """Whether steps with prompts can be captured in a graph (with pieces only)."""
        return not self.pieces.kernel.needs_copies

    def attention(self, softcap: float = 0.0) -> PromptAttention:
        """The chosen kernels, loaded."""
        whole, fresh = (timing and timing.kernel.load() for timing in (self.whole, self.fresh))
        return PromptAttention(self.rules, self.pieces.kernel.load(), whole=whole, fresh=fresh, softcap=softcap)

    def decisions(self) -> list[tuple[str, str, str]]:
        """(what, value, because) for the startup report."""
        from_, parts = self.rules.whole_from, [f"others {self.pieces.kernel.name}"]
        if self.fresh:
            parts.insert(0, f"new prompts {self.fresh.kernel.name}")
        if self.whole:
            parts.insert(0, f"from {from_} tokens {self.whole.kernel.name}")
        timings = [timing for timing in (self.whole, self.fresh, self.pieces) if timing]
        lengths, us = ", ".join(map(str, LENGTHS)), "; ".join(map(str, timings))
        measured = f"{TOKENS} tokens as prompts of {lengths} take {us} us"
        found = [
            ("attention of tokens", "own kernel", "reads keys and values once, in parts side by side"),
            ("attention of prompts", ", ".join(parts), measured),
        ]
        if self.left_out:
            found.append(("attention left out", str(len(self.left_out)), "; ".join(self.left_out)))
        return found


def choose(need: Need, timings: Iterable[KernelTiming], left_out: Iterable[str] = ()) -> AttentionChoice:
    """Chooses the fastest kernel of each path, those that copy last, and the length from which prompts are squares. Pure. Needs
    at least one kernel of pieces. `fits_graphs` is the same on all ranks of a model, whatever they measured."""
    best: dict[str, KernelTiming] = {}
    for timing in sorted(timings, key=lambda timing: (timing.kernel.needs_copies, timing.total)):
        best.setdefault(timing.kernel.path, timing)
    pieces, fresh, whole = best["pieces"], best.get("fresh"), best.get("whole")
    if fresh and not fresh.us[0] < pieces.us[0]:
        fresh = None
    whole_from = _whole_from(whole, [timing for timing in (pieces, fresh) if timing])
    rules = Rules(whole_from, need.window or Rules().whole_to, packs_fresh=fresh is not None)
    return AttentionChoice(rules, pieces, fresh, whole if whole_from else None, tuple(left_out))


def _whole_from(whole: KernelTiming | None, others: list[KernelTiming]) -> int:
    """The smallest length from which squares win at every length tried; 0 if they never do."""
    if whole is None:
        return 0
    found = 0
    for i in reversed(range(len(LENGTHS))):
        if whole.us[i] == UNTRIED:
            continue
        if whole.us[i] >= min(other.us[i] for other in others):
            break
        found = LENGTHS[i]
    return found


_chosen: dict[tuple[Need, int, int], AttentionChoice] = {}


def choose_on_gpu(need: Need, q_heads: int, kv_heads: int) -> AttentionChoice:
    """Chooses by trials on the current device, once per (need, heads). Raises RuntimeError if no kernel works."""
    key = need, q_heads, kv_heads
    if key not in _chosen:
        timings, left_out = try_kernels(need, q_heads, kv_heads)
        if not any(timing.kernel.path == "pieces" for timing in timings):
            raise RuntimeError(f"no attention for prompts on this GPU: {'; '.join(left_out)}")
        _chosen[key] = choose(need, timings, left_out)
    return _chosen[key]
