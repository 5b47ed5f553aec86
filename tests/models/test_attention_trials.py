"""What kernels are tried on, on the CPU: every way must see the same attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.models.test_cuda_spread import OnCpu
from tests.models.test_prefill_plan import fresh, whole
from trireme.models.cuda.attention.registry import AttentionTrial, Need
from trireme.models.cuda.reference import piece_attention_reference


@pytest.mark.parametrize("length", [16, 32, 64])
def test_a_trial_is_the_same_for_every_way(length: int) -> None:
    ways: tuple[tuple[Any, Any], ...] = (("fresh", fresh), ("whole", whole), ("pieces", piece_attention_reference))
    with OnCpu():
        trial = AttentionTrial(length, Need(torch.float32, 8), 4, 2, tokens=64)
        found = [trial.launch(trial.attention(way, run))().clone() for way, run in ways]
    assert found[0].isfinite().all()
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=1e-4, atol=1e-5)
