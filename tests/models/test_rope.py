"""Rotary frequencies of every rule have the published values (O29), and the table is cosines then sines."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from trireme.model.reader import RopeSpec
from trireme.models.arch.rope import attention_scale, cos_sin_table, inverse_frequencies

LLAMA3 = RopeSpec(kind="llama3", theta=500000.0, dim=16, factor=8.0, original_max_position=8192)
YARN = RopeSpec(kind="yarn", theta=10000.0, dim=16, factor=4.0, original_max_position=64)


def assert_frequencies(spec: RopeSpec, expected: list[float]) -> None:
    torch.testing.assert_close(torch.from_numpy(inverse_frequencies(spec)), torch.tensor(expected), rtol=1e-6, atol=0)


def test_default_and_linear_frequencies() -> None:
    assert_frequencies(RopeSpec(dim=8), [1.0, 0.1, 0.01, 0.001])
    assert_frequencies(RopeSpec(kind="linear", dim=8, factor=4.0), [0.25, 0.025, 0.0025, 0.00025])


def test_llama3_rule_keeps_short_waves_and_slows_long_ones() -> None:
    expected = [1, 0.1939227447, 0.03760603093, 0.007292664737, 0.000524846161, 3.428102196e-05]
    assert_frequencies(LLAMA3, [*expected, 6.647869871e-06, 1.289173172e-06])
    assert attention_scale(LLAMA3) == 1.0


def test_yarn_ramps_between_its_bounds() -> None:
    expected = [1, 0.23717082, 0.05, 0.0079056942, 0.0025, 0.00079056942, 0.00025, 7.9056942e-05]
    assert_frequencies(YARN, expected)
    assert attention_scale(YARN) == pytest.approx(1.138629436, rel=1e-9)


def test_table_holds_scaled_cosines_then_sines() -> None:
    table = torch.from_numpy(cos_sin_table(YARN, 10))
    assert table.shape == (10, 16)
    torch.testing.assert_close(table[0], torch.tensor([1.138629436] * 8 + [0.0] * 8))
    angle = torch.tensor(7 * 0.05)
    torch.testing.assert_close(table[7, 2], angle.cos() * 1.138629436)
    torch.testing.assert_close(table[7, 8 + 2], angle.sin() * 1.138629436)


def test_divisors_slow_each_pair() -> None:
    plain, slowed = RopeSpec(dim=8), np.array([1.0, 2.0, 4.0, 8.0], np.float32)
    table = torch.from_numpy(cos_sin_table(plain, 5, slowed))
    torch.testing.assert_close(table[3, 2], torch.tensor(3 * 0.01 / 4).cos())
