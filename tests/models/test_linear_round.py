"""Rounding of dense weights while loading: bits of ggml's reference for q8_0 and q4_0, int8 with one scale for each row."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from trireme.models.cpu.packed_ops import linear, pack, quantize
from trireme.models.cpu.tensors import raw_from_tensor
from trireme.models.weights.gguf_expand import dequantize

N, K = 37, 416


def weights() -> np.ndarray:
    values = np.random.default_rng(3).standard_normal((N, K)).astype(np.float32)
    values[0] = 0
    values[1, :32] = 0
    values[2] *= 1e-6  # scales that are subnormal in fp16
    values[3] *= 1e-10
    values[4] *= 3e4
    values[5, ::2] = 0.5
    return values


@pytest.mark.parametrize("scheme", ["q8_0", "q4_0"])
def test_rounding_is_that_of_the_reference(scheme: str) -> None:
    values = weights()
    kind, raw = quantize(scheme, torch.from_numpy(values))
    np.testing.assert_array_equal(raw, quants.quantize(values, GGMLQuantizationType[kind]).reshape(raw.shape))


def test_int8_has_one_scale_for_each_row_and_errs_by_half_a_step() -> None:
    values = weights()
    kind, raw = quantize("int8", torch.from_numpy(values))
    assert raw.shape == (N, 4 + K)
    largest = np.abs(values).max(1, keepdims=True)
    np.testing.assert_array_equal(raw[:, :4].copy().view(np.float32), largest / np.float32(127))
    assert (np.abs(raw[:, 4:].view(np.int8).astype(np.int16)).max(1) == np.where(largest[:, 0] == 0, 0, 127)).all()
    error = np.abs(dequantize(kind, raw, N, K) - values)
    assert (error <= largest * (0.5 / 127 + 1e-6)).all()


def test_an_int8_row_that_is_not_finite_becomes_nan_alone() -> None:
    values = weights()
    values[7, 3], values[8, 5], values[8, 6] = np.inf, np.nan, 1.0
    kind, raw = quantize("int8", torch.from_numpy(values))
    is_nan = np.isnan(dequantize(kind, raw, N, K))
    assert is_nan[7:9].all()
    assert is_nan.sum() == 2 * K


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_any_dense_dtype_multiplies_after_rounding(dtype: torch.dtype) -> None:
    dense = torch.from_numpy(weights()[10:]).to(dtype)
    x = torch.randn(3, K)
    for scheme, bound in (("q8_0", 0.02), ("int8", 0.03), ("q4_0", 0.2)):
        kind, raw = quantize(scheme, dense)
        result = linear(x, pack(kind, raw, *dense.shape))
        reference = x @ dense.float().T
        assert float((result - reference).norm() / reference.norm()) < bound


def test_matrices_of_a_dense_file_are_rounded_where_their_rows_are_whole_blocks() -> None:
    dense = torch.from_numpy(weights()).to(torch.bfloat16)
    for scheme, kind in (("q8_0", "Q8_0"), ("q4_0", "Q4_0"), ("int8", "INT8")):
        rounded = raw_from_tensor(dense).computable(scheme)
        assert rounded.kind == kind
        np.testing.assert_array_equal(rounded.raw, quantize(scheme, dense)[1])
        assert rounded.computable(scheme) is rounded, "blocks stay as they are"
    cut = raw_from_tensor(dense[:, :40].contiguous())
    assert (cut.computable("q8_0").kind, cut.computable("int8").kind) == ("BF16", "INT8")
