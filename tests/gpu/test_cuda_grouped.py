"""Weights with grouped scales on a GPU, 4-bit codes and float8 in blocks: kernels against float64, checkpoints by the engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_cuda_model import error
from tests.gpu.test_cuda_ops import poisoned
from tests.gpu.test_cuda_quantized import same_as_on_the_cpu
from tests.models.test_cuda_linear import HF_BLOCKS, float8
from tests.models.tiny import make_tiny
from tests.models.tiny_packed import awq_config, gptq_config, make_packed
from trireme.models.cuda import ops, reference
from trireme.models.cuda.layers.linear import DeviceMatrix, make_linear
from trireme.models.cuda.layers.packed_linear import Fp8BlocksLinear, W4Linear
from trireme.models.cuda.layers.quantize import w4_layout
from trireme.models.cuda.weights.sources import ROUNDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
HALF = [torch.float16, torch.bfloat16]
FORMS = ("w4_32", "w4_64", "w4_128", "fp8_blocks")
ROUNDING = {torch.float16: 2.0**-11, torch.bfloat16: 2.0**-8}  # of one value to the type of the output


def matrix_of(form: str, n: int, k: int) -> DeviceMatrix:
    """Outputs and groups of very different sizes, so that a scale in the wrong place is seen."""
    sizes = torch.linspace(0.01, 1, n, device="cuda")[:, None] * torch.rand(1, k, device="cuda").add_(0.1)
    return ROUNDED[form](torch.randn(n, k, device="cuda") * sizes)


def values_of(matrix: DeviceMatrix) -> Tensor:
    """float64 [n, k]"""
    assert matrix.scale is not None
    if matrix.format == "fp8_blocks":
        return matrix.values.double() * matrix.scale.double().repeat_interleave(128, 1)
    return reference.w4_values(matrix.values, matrix.scale.T).double()


def worst(found: Tensor, x: Tensor, values: Tensor, bias: Tensor | None, rounding: float) -> float:
    """The largest error of an output over what its type and sums in float32 allow."""
    expected = x.double() @ values.T + (0 if bias is None else bias.double())
    allowed = rounding * expected.abs() + 2e-6 * (x.double().abs() @ values.abs().T) + 1e-7
    return float(((found.double() - expected).abs() / allowed).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("shape", [(16, 128), (200, 640), (64, 1024), (1000, 4352)], ids=str)
def test_few_rows(form: str, dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """One group alone, outputs that are no multiple of a block's, inputs that are no turn for each warp, several turns each."""
    n, k = shape
    matrix, bias = matrix_of(form, n, k), torch.randn(n, device="cuda").to(dtype)
    values = values_of(matrix)
    assert matrix.scale is not None
    groups = matrix.scale.T.contiguous()
    op = ops.skinny_fp8_blocks if form == "fp8_blocks" else ops.skinny_w4
    for rows in (1, 2, 8, 9, 16, 17, 31, 32):
        x = torch.randn(rows, k + 64, device="cuda").to(dtype)[:, 32 : 32 + k]
        out = poisoned(rows, n + 16, dtype=dtype)
        op(x, matrix.values, groups, out[:, 8 : 8 + n], bias)
        assert worst(out[:, 8 : 8 + n], x, values, bias, ROUNDING[dtype]) <= 1
        assert out[:, :8].isnan().all()
        assert out[:, 8 + n :].isnan().all()
        op(x, matrix.values, groups, out[:, 8 : 8 + n])
        assert worst(out[:, 8 : 8 + n], x, values, None, ROUNDING[dtype]) <= 1


@pytest.mark.parametrize("dtype", HALF)
def test_a_row_is_the_same_among_others(dtype: torch.dtype) -> None:
    matrix = matrix_of("w4_128", 96, 1024)
    linear = make_linear([matrix], None)
    x = torch.randn(32, 1024, device="cuda").to(dtype)
    many = linear(x, poisoned(32, 96, dtype=dtype))
    assert torch.equal(linear(x, poisoned(32, 96, dtype=dtype)), many)
    assert error(linear(x[5:6], poisoned(1, 96, dtype=dtype)), many[5:6]) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", HALF)
def test_values(form: str, dtype: torch.dtype) -> None:
    matrix = matrix_of(form, 37, 768)
    assert matrix.scale is not None
    groups = matrix.scale.T.contiguous()
    op = ops.expand_fp8_blocks if form == "fp8_blocks" else ops.expand_w4
    expected = values_of(matrix)
    found = op(matrix.values, groups, poisoned(37, 768, dtype=dtype))
    torch.testing.assert_close(found, expected.float().to(dtype), rtol=0, atol=0)
    part = op(matrix.values[5:21], groups[:, 5:21], poisoned(16, 768, dtype=dtype))
    assert torch.equal(part, found[5:21])


def test_every_code_and_zero() -> None:
    """All pairs of a code and a zero, each code at every place of a word and in every lane."""
    codes = torch.arange(256, device="cuda")[:, None] // 16 + torch.arange(128, device="cuda")[None]
    zeros = torch.arange(256, device="cuda") % 16
    head = torch.tensor([0x3C00], device="cuda", dtype=torch.int32) | (zeros.to(torch.int32) << 16)[:, None]
    places = (codes % 16).to(torch.uint8)
    raw = torch.cat((head.view(torch.uint8), places[:, 0::2] | places[:, 1::2] << 4), 1)
    layout, groups = w4_layout(raw, 128)
    expected = (codes % 16 - zeros[:, None]).double()
    x = torch.eye(128, device="cuda")
    for dtype in HALF:
        for start in range(0, 128, 32):
            rows = x[start : start + 32].to(dtype)
            out = ops.skinny_w4(rows, layout, groups.T.contiguous(), poisoned(32, 256, dtype=dtype))
            torch.testing.assert_close(out.double(), expected.T[start : start + 32], rtol=0, atol=0)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("forms", [("w4_128", "w4_128"), ("w4_64", "half"), ("fp8_blocks", "fp8_blocks")], ids=str)
@pytest.mark.parametrize("rows", [1, 32, 33, 128, 129, 300])
def test_products_of_any_number_of_rows(
    dtype: torch.dtype, forms: tuple[str, ...], rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.models.cuda.layers.packed_linear._EXPANDED", 512 * 50)  # expanded in several parts
    dense = [torch.randn(n, 512, device="cuda").to(dtype) * 0.05 for n in (144, 64)]
    matrices = [ROUNDED[form](weight) for form, weight in zip(forms, dense, strict=True)]
    values = torch.cat([m.values.double() if m.format == "half" else values_of(m) for m in matrices])
    bias, x = torch.randn(208, device="cuda").to(dtype), torch.randn(rows, 512, device="cuda").to(dtype)
    linear = make_linear(matrices, bias)
    assert isinstance(linear, (W4Linear, Fp8BlocksLinear)) is (forms[0] == forms[1])
    found = linear(x, poisoned(rows, 208, dtype=dtype))
    assert error(found, x.double() @ values.T + bias.double()) < 2 * ROUNDING[dtype]


@pytest.mark.parametrize(("k", "rows", "group"), [(192, 4, 64), (256, 33, 128), (256, 4, 256)])
def test_what_no_kernel_takes_is_refused(k: int, rows: int, group: int) -> None:
    x, codes = torch.zeros(rows, k, device="cuda").half(), torch.zeros(16, k // 2, device="cuda", dtype=torch.uint8)
    groups = torch.zeros(k // group, 16, device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match="groups of 32, 64 or 128"):
        ops.skinny_w4(x, codes, groups, torch.zeros(rows, 16, device="cuda").half())


# ---------------------------------------------------------------- the engine

PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(4 + 40 * i)] for i in range(5)]
SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 512,
    "max_position_embeddings": 1024,
}


@pytest.mark.parametrize(
    "config", [gptq_config(group=128, sym=True), gptq_config(group=64, desc_act=True), awq_config(128)], ids=str
)
def test_packed_checkpoints_through_the_engine(config: dict[str, Any], tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, config, **SHAPE)
    same_as_on_the_cpu(packed, PROMPTS, 0.15)


def test_float8_blocks_through_the_engine(tmp_path: Path) -> None:
    path = float8(make_tiny(tmp_path, dtype="bfloat16", **SHAPE), "block", suffix="_scale_inv", config=HF_BLOCKS)
    same_as_on_the_cpu(path, PROMPTS, 0.15)
