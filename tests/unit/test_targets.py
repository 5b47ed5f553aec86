"""Latency targets as users write them."""

from __future__ import annotations

from math import inf

import pytest

from trireme.errors import ConfigError
from trireme.sizes import format_seconds, parse_seconds
from trireme.targets import automatic_itl_target, itl_targets, most_crowd, parse_target, tier_targets, ttft_target


@pytest.mark.parametrize(
    ("text", "seconds"), [("50ms", 0.05), ("1.5s", 1.5), ("2min", 120.0), ("0.05", 0.05), (" 0.8 ms ", 0.0008)]
)
def test_times(text: str, seconds: float) -> None:
    assert parse_seconds(text) == pytest.approx(seconds)


@pytest.mark.parametrize("text", ["", "fast", "-1s", "0", "5 h", "1e3", "nan", "100000s"])
def test_what_is_no_time_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="a time"):
        parse_seconds(text)


def test_times_as_text() -> None:
    assert [format_seconds(s) for s in (0.0105, 0.05, 1.0, 12.34)] == ["10.5 ms", "50 ms", "1 s", "12.3 s"]


def test_targets_by_tier() -> None:
    assert itl_targets("auto", 0.012) == {"default": 0.012}
    assert itl_targets("off,priority=25ms", 0.012) == {"default": inf, "priority": 0.025}
    assert itl_targets("flex=off", 0.012) == {"default": 0.012, "flex": inf}
    assert tier_targets("50ms,flex=1s") == {"flex": 1.0}
    assert (ttft_target("off"), ttft_target("1s")) == (0.0, 1.0)
    assert parse_target("off") == inf


def test_soft_targets_may_be_widened() -> None:
    assert itl_targets("~50ms,priority=25ms", 0.012) == {"default": 0.05, "priority": 0.025}
    assert [most_crowd(text) for text in ("~50ms", "auto", "flex=off", "50ms", "off,flex=1s")] == [
        2.5,
        2.5,
        2.5,
        1.0,
        1.0,
    ]


@pytest.mark.parametrize("text", ["soon", "50ms,slow=1s", "50ms,60ms", "priority=", "50ms,,"])
def test_wrong_targets_name_the_flag_and_the_value(text: str) -> None:
    with pytest.raises(ConfigError, match="--itl-target is") as caught:
        itl_targets(text, 0.05)
    assert text in caught.value.message


def test_a_wrong_ttft_target_is_named() -> None:
    with pytest.raises(ConfigError, match="--ttft-target is 'auto'"):
        ttft_target("auto")


def test_automatic_targets() -> None:
    assert automatic_itl_target(90 << 20, is_on_gpu=False)[0] == 0.05
    assert automatic_itl_target(1 << 30, is_on_gpu=True)[0] == 0.01
    assert automatic_itl_target(16_000_000_000, is_on_gpu=True)[0] == pytest.approx(0.0117, abs=1e-4)
