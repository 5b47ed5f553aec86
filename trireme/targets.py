"""Latency targets as settings and headers write them: between tokens (itl-target) and to the first token (ttft-target).

Used by trireme.resolve, engine_core (the engine's own target) and serving (those of service tiers and of single requests).
"""

from __future__ import annotations

from math import inf

from trireme.errors import ConfigError
from trireme.sizes import parse_seconds

CPU_ITL_S = 0.05  # 20 tokens a second, more than people read
GPU_ITL_S = 0.01  # at least
GPU_WEIGHTS_PER_S = 3e12  # bytes that a GPU reads in a second, roughly
GPU_DECODE_STEPS = 2.2  # steps of decoding alone that one with prompt tokens may last
CPU_DECODE_STEPS = 3.0  # the same: a CPU computes each sequence, and the work of prompts is about as much

AUTO, OFF, SOFT = "auto", "off", "~"
MOST_CROWD = 2.5  # times a soft target that a step may last while many wait for their first token
TIERS = ("default", "priority", "flex")
"""Service tiers that may have a target of their own; `default` is the one without a name."""


def parse_target(text: str, *, auto: float | None = None) -> float:
    """One target in seconds; infinite for `off`, `auto` as given. Raises ValueError that says what was expected."""
    if text == OFF:
        return inf
    if text == AUTO and auto is not None:
        return auto
    try:
        return parse_seconds(text)
    except ValueError as error:
        words = "auto, off" if auto is not None else "off"
        raise ValueError(f"{error}, or {words}") from error


def decode_steps(*, is_on_gpu: bool) -> float:
    """How many times as long as its decoding part a step with prompt tokens may always take."""
    return GPU_DECODE_STEPS if is_on_gpu else CPU_DECODE_STEPS


def automatic_itl_target(weight_bytes: int, *, is_on_gpu: bool) -> tuple[float, str]:
    """Seconds that `auto` stands for, and why. `weight_bytes`: of one worker. A GPU reads all weights in a step of few sequences,
    and computes hundreds of prompt tokens in the same time; a CPU is bound by computing soon."""
    if not is_on_gpu:
        return CPU_ITL_S, "faster than people read; smaller steps would cost a CPU throughput"
    seconds = max(GPU_ITL_S, GPU_DECODE_STEPS * weight_bytes / GPU_WEIGHTS_PER_S)
    return seconds, f"about {GPU_DECODE_STEPS:g} x the time in which a GPU reads the weights"


def itl_targets(text: str, auto: float) -> dict[str, float]:
    """Seconds by service tier, from `50ms,flex=200ms`; tiers not named are left out. Raises ConfigError."""
    found: dict[str, float] = {}
    for part in text.split(","):
        tier, named, value = part.strip().rpartition("=")
        tier = tier.strip() if named else TIERS[0]
        if tier not in TIERS or tier in found:
            what = "is named twice" if tier in found else "is no service tier"
            raise ConfigError(f"--itl-target is {text!r}: {tier!r} {what}", hint=f"tiers are {', '.join(TIERS[1:])}")
        try:
            found[tier] = parse_target(value.strip().removeprefix(SOFT), auto=auto)
        except ValueError as error:
            raise ConfigError(f"--itl-target is {text!r}: {error}", hint="--itl-target 50ms") from error
    return {TIERS[0]: auto, **found}


def most_crowd(text: str) -> float:
    """By how much the target of the default tier may be widened while many wait for their first token: a soft one (`~50ms`) is."""
    parts = [part.strip() for part in text.split(",")]
    is_soft = any(part == AUTO or part.startswith(SOFT) for part in parts) or all("=" in part for part in parts)
    return MOST_CROWD if is_soft else 1.0


def tier_targets(text: str) -> dict[str, float]:
    """Of the service tiers that have a target of their own, in seconds. Raises ConfigError."""
    return {tier: target for tier, target in itl_targets(text, inf).items() if tier != TIERS[0]}


def ttft_target(text: str) -> float:
    """Seconds; 0 for `off`. Raises ConfigError."""
    try:
        seconds = parse_target(text)
    except ValueError as error:
        raise ConfigError(f"--ttft-target is {text!r}: {error}", hint="--ttft-target 1s") from error
    return 0.0 if seconds == inf else seconds
