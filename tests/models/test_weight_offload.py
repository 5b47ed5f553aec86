"""Weights put away and brought back, on the CPU: the same tensors, views and layers, and no memory in between."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda.layers.linear import Fp8Linear, SideBySide, make_linear
from trireme.models.cuda.weight_offload import OffloadedWeights, tensors_of
from trireme.models.cuda.weights.sources import ROUNDED


@pytest.fixture(autouse=True)
def _no_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_ops, "fp8_linear_rows", lambda k: 0)


def layers() -> list[Any]:
    torch.manual_seed(0)
    bias = torch.randn(48).bfloat16()
    return [
        make_linear([ROUNDED["fp8"](torch.randn(48, 256).bfloat16())], bias),
        make_linear([ROUNDED[form](torch.randn(16, 256).bfloat16()) for form in ("q4_k", "half", "fp8")], None),
    ]


def test_every_tensor_is_found() -> None:
    fp8, mixed = layers()
    assert isinstance(fp8, Fp8Linear)
    assert isinstance(mixed, SideBySide)
    found = tensors_of([fp8, mixed])
    storages = {tensor.untyped_storage().data_ptr() for tensor in found}
    assert {fp8.weight.data_ptr(), fp8._scale.data_ptr(), fp8._bias.data_ptr()} <= storages
    assert len(storages) == 3 + 1 + 1 + 2  # weight, scale and bias; blocks; halves; weight and scale


def test_what_is_brought_back_is_what_was() -> None:
    made = layers()
    tensors = tensors_of(made)
    before = [tensor.clone() for tensor in tensors]
    shelf = OffloadedWeights(tensors)
    assert shelf.nbytes == 48 * 256 + 48 * 4 + 48 * 2 + 16 * 144 + 16 * 512 + 16 * 256 + 16 * 4
    for _ in range(2):
        shelf.offload()
        assert all(tensor.untyped_storage().nbytes() == 0 for tensor in tensors)
        shelf.restore()
        for tensor, old in zip(tensors, before, strict=True):
            assert torch.equal(
                tensor.float() if tensor.dtype == torch.float8_e4m3fn else tensor,
                old.float() if old.dtype == torch.float8_e4m3fn else old,
            )


def test_what_others_made_is_left_alone() -> None:
    class Stranger:
        buffer = torch.ones(3)

    assert tensors_of([Stranger(), {"a": torch.ones(3)}, 5, None]) == []
