"""Products of int8 with int8 on a GPU: the kernels against their references to the bit, whichever way the number of rows goes, and
whole models and the engine against the CPU, whose definition is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.gpu.test_cuda_model import GpuDriver, error, load_on_gpu
from tests.gpu.test_cuda_ops import ALL, HALF, poisoned, random, some_scales
from tests.gpu.test_cuda_quantized import PROMPTS, SHAPE, same_as_on_the_cpu, told
from tests.models.drive import load, logits_of
from tests.models.test_int8_model import compressed
from tests.models.tiny import make_tiny
from trireme import LLM
from trireme.models.cuda import ops, reference
from trireme.models.cuda.layers.int8_linear import Int8Linear
from trireme.models.cuda.layers.linear import make_linear
from trireme.models.cuda.weights.sources import ROUNDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
TINY = {"vocab_size": 512, "max_position_embeddings": 1024, **SHAPE}


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def codes(*shape: int) -> Tensor:
    return torch.randint(-127, 128, shape, device="cuda", dtype=torch.int8)


def room(x: Tensor) -> tuple[Tensor, Tensor]:
    """For x rounded, with what a kernel that skips something leaves visible."""
    return torch.full(x.shape, -128, device="cuda", dtype=torch.int8), poisoned(x.shape[0], dtype=torch.float32)


def same(found: Tensor, expected: Tensor) -> bool:
    return bool(((found == expected) | (found.isnan() & expected.isnan())).all())


# ---------------------------------------------------------------- rounding of inputs


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(("tokens", "width"), [(5, 64), (33, 4096), (700, 14336), (6, 72)])
def test_quantize_rows(dtype: torch.dtype, tokens: int, width: int) -> None:
    x = random(tokens, width + 16, dtype=dtype)[:, 8 : width + 8]
    x[0], x[1, 5], x[2, -1], x[3] = 0, float("nan"), -float("inf"), 1e-6
    (out, scale), (expected, expected_scale) = room(x), room(x)
    ops.quantize_rows(x, out, scale)
    reference.quantize_rows_reference(x, expected, expected_scale)
    assert same(scale, expected_scale)
    assert torch.equal(out, expected)
    assert scale.isnan().nonzero().flatten().tolist() == [1, 2]
    assert out[4:].abs().amax(1).eq(127).all()
    ops.quantize_rows(x, out.zero_(), scale.zero_(), x.float().abs().amax(-1))
    assert same(scale, expected_scale)
    assert torch.equal(out, expected)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tokens", "hidden"), [(1, 64), (33, 4096), (700, 576)])
def test_a_norm_rounds_what_it_has_normed(dtype: torch.dtype, tokens: int, hidden: int) -> None:
    x, residual, weight = (
        random(tokens, hidden, dtype=dtype),
        random(tokens, hidden, dtype=dtype),
        random(hidden, dtype=dtype),
    )
    for scales in (None, some_scales(tokens, hidden)):
        mine, theirs = residual.clone(), residual.clone()
        normed = ops.rms_norm(x, weight, 1e-5, torch.empty_like(x), residual=theirs, scales=scales)
        (out, scale), (expected, expected_scale) = room(x), room(x)
        ops.rms_norm_narrow(x, weight, 1e-5, out, scale, residual=mine, scales=scales)
        ops.quantize_rows(normed, expected, expected_scale)
        assert torch.equal(mine, theirs)
        assert torch.equal(scale, expected_scale)
        assert torch.equal(out, expected)


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(
    ("n", "k"),
    [(16, 64), (1, 16), (33, 80), (100, 576), (57, 1072), (200, 2064), (4096, 4096), (130, 14336)],
    ids=str,
)
def test_every_number_of_rows(dtype: torch.dtype, n: int, k: int) -> None:
    """Outputs that are no multiple of a block's; inputs that are no turn for a lane, a warp or all warps, and several turns."""
    weight, scale, bias = codes(n, k), torch.rand(n, device="cuda") * 0.01, random(n, dtype=dtype)
    every = codes(ops.INT8_ROWS, k + 32)[:, 16 : 16 + k]
    x_scale = torch.rand(ops.INT8_ROWS, device="cuda") * 0.01
    for given in (None, bias):
        whole = torch.empty(ops.INT8_ROWS, n, device="cuda", dtype=dtype)
        reference.skinny_int8_reference(every, x_scale, weight, scale, whole, given)
        for rows in range(1, ops.INT8_ROWS + 1):
            out = poisoned(rows, n + 9, dtype=dtype)
            ops.skinny_int8(every[:rows], x_scale[:rows], weight, scale, out[:, 3 : 3 + n], given)
            assert torch.equal(out[:, 3 : 3 + n], whole[:rows]), rows
            assert out[:, :3].isnan().all()
            assert out[:, 3 + n :].isnan().all()


@pytest.mark.parametrize("ways", [1, 2, 4, 8])
@pytest.mark.parametrize(("n", "k"), [(16, 64), (300, 1072), (4096, 4096)], ids=str)
def test_any_number_of_ways(ways: int, n: int, k: int) -> None:
    weight, scale, bias = codes(n, k), torch.rand(n, device="cuda") * 0.01, random(n, dtype=torch.bfloat16)
    for rows in (1, 8, 9, 16, 20, 32, 33, 64):
        x, x_scale = codes(rows, k), torch.rand(rows, device="cuda") * 0.01
        expected = torch.empty(rows, n, device="cuda", dtype=torch.bfloat16)
        reference.skinny_int8_reference(x, x_scale, weight, scale, expected, bias)
        out = poisoned(rows, n, dtype=torch.bfloat16)
        ops.skinny_int8(x, x_scale, weight, scale, out, bias, ways=ways)
        assert torch.equal(out, expected), rows


@pytest.mark.parametrize("rows", [1, 9, 17, 33])
@pytest.mark.parametrize("sign", [1, -1])
def test_the_longest_rows_do_not_overflow(rows: int, sign: int) -> None:
    k = 1 << 17
    weight = torch.full((3, k), -128, device="cuda", dtype=torch.int8)
    weight[1], weight[2, : k // 2] = 127, 127
    x = torch.full((rows, k), sign * 127, device="cuda", dtype=torch.int8)
    ones, unit = torch.ones(rows, device="cuda"), torch.full((3,), 2.0**-20, device="cuda")
    out = ops.skinny_int8(x, ones, weight, unit, poisoned(rows, 3, dtype=torch.bfloat16))
    expected = torch.tensor([-128.0, 127.0, -0.5], device="cuda") * 127 * k * 2.0**-20 * sign
    assert torch.equal(out, expected.bfloat16().expand(rows, 3))


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    x, weight = random(20, 512, dtype=torch.bfloat16), random(48, 512, dtype=torch.bfloat16)
    x[7, 100] = float("nan")
    for rows in (8, 16, 20):
        found = make_linear([ROUNDED["int8"](weight)], None)(x[:rows], poisoned(rows, 48, dtype=torch.bfloat16))
        assert found[7].isnan().all()
        found[7] = 0
        assert found.isfinite().all()


def test_what_no_kernel_takes_is_refused() -> None:
    out, scale = poisoned(65, 16, dtype=torch.bfloat16), torch.ones(65, device="cuda")
    for rows, k, dtype, what in (
        (65, 64, torch.bfloat16, "65 rows, K 64"),
        (4, 72, torch.bfloat16, "4 rows, K 72"),
        (4, 64, torch.float32, "float16 or bfloat16"),
    ):
        with pytest.raises(ValueError, match=what):
            ops.skinny_int8(codes(rows, k), scale[:rows], codes(16, k), scale[:16], out[:rows].to(dtype))
    sums = torch.zeros(4, 6, device="cuda", dtype=torch.int32)
    with pytest.raises(ValueError, match="outputs that 4 divides; got 6"):
        ops.scale_int8(sums, scale[:4], scale[:6], out[:4, :6])
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("rows", "n"), [(1, 8), (70, 1032), (300, 28672)])
@pytest.mark.parametrize("first", [0, 3, 4])
def test_sums_are_scaled(dtype: torch.dtype, rows: int, n: int, first: int) -> None:
    """Where the output is and is not fit for stores of several values."""
    sums = torch.randint(-(1 << 31), 1 << 31, (rows, n), device="cuda", dtype=torch.int64).int()
    x_scale, scale, bias = torch.rand(rows, device="cuda"), torch.rand(n, device="cuda") * 1e-6, random(n, dtype=dtype)
    for given in (None, bias):
        expected = reference.scale_int8_reference(sums, x_scale, scale, torch.empty_like(sums, dtype=dtype), given)
        out = poisoned(rows, n + 8, dtype=dtype)
        ops.scale_int8(sums, x_scale, scale, out[:, first : first + n], given)
        assert torch.equal(out[:, first : first + n], expected)
        assert out[:, :first].isnan().all()
        assert out[:, first + n :].isnan().all()


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("sizes", [(144, 64), (40, 24), (13, 20)], ids=str)
@pytest.mark.parametrize("biased", [True, False])
def test_all_ways_give_the_same_bits(
    dtype: torch.dtype, sizes: tuple[int, int], biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Our kernel, torch's product in slices of rows with a short one last, and outputs that it does not take."""
    n = sum(sizes)
    monkeypatch.setattr("trireme.models.cuda.layers.int8_linear._SUMS", 128 * n)
    monkeypatch.setattr("trireme.models.cuda.layers.int8_linear._ROWS", 128)
    matrices = [ROUNDED["int8"](random(size, 528, dtype=dtype) * 0.05) for size in sizes]
    weight = torch.cat([matrix.values for matrix in matrices])
    scale = torch.cat([matrix.scale for matrix in matrices if matrix.scale is not None])
    bias, x = random(n, dtype=dtype) if biased else None, random(300, 528, dtype=dtype)
    narrow, x_scale = room(x)
    reference.quantize_rows_reference(x, narrow, x_scale)
    expected = reference.skinny_int8_reference(
        narrow, x_scale, weight, scale, torch.empty(300, n, device="cuda").to(dtype), bias
    )
    linear = make_linear(matrices, bias)
    assert isinstance(linear, Int8Linear)
    for rows in (1, 16, 17, 32, 33, 64, 65, 128, 129, 145, 200, 300):
        out = poisoned(rows, n + 5, dtype=dtype)
        linear(x[:rows], out[:, 1 : 1 + n])
        assert torch.equal(out[:, 1 : 1 + n], expected[:rows]), rows
        assert out[:, 1 + n :].isnan().all()
        given = poisoned(rows, n, dtype=dtype)
        assert linear.unscaled(narrow[:rows], x_scale[:rows], given) is None
        assert torch.equal(given, expected[:rows]), rows


# ---------------------------------------------------------------- whole models, and the engine


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_a_checkpoint_says_what_it_says_on_the_cpu(strategy: str, tmp_path: Path) -> None:
    """The CPU computes in float32. What 16 bits round differently moves inputs across the borders of int8's steps, by which the
    same body in plain torch and bfloat16 errs by 0.05; in float32 it errs by 0.004."""
    path = compressed(make_tiny(tmp_path, dtype="bfloat16", **TINY), strategy)
    prompt = [(7 * i * i + 3 * i) % 500 for i in range(150)]
    expected = logits_of(load(path), prompt)
    model = load_on_gpu(path)
    many = GpuDriver(model, 1, 160).step([(0, prompt)], all_logits=True)
    assert many is not None
    driver = GpuDriver(model, 1, 160)
    few = torch.cat([driver.step([(0, [token])]) for token in prompt[:60]])
    assert error(many, expected) < 0.08
    assert error(few, expected[:60]) < 0.08


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_checkpoints_through_the_engine(strategy: str, tmp_path: Path) -> None:
    path = compressed(make_tiny(tmp_path, dtype="bfloat16", **TINY), strategy)
    same_as_on_the_cpu(path, PROMPTS, 0.3)


def test_two_ranks(tmp_path: Path) -> None:
    path = compressed(make_tiny(tmp_path, dtype="bfloat16", **TINY))
    same_as_on_the_cpu(path, PROMPTS, 0.3, tp=2, share_gpus=torch.cuda.device_count() < 2)


def test_rounding_while_loading_and_steps_of_many_rows(tmp_path: Path) -> None:
    """Graphs of more rows than our kernel takes, or than are measured in its favour."""
    path = make_tiny(tmp_path, dtype="bfloat16", **TINY)
    settings = {"device": "cuda", "load_format": "dummy", "quantize": "int8", "kv_memory": "128MiB"}
    with LLM(path, max_num_seqs=128, max_len=256, **settings) as llm:  # type: ignore[arg-type]
        prompts = [[(7 * i + 3 * j) % 250 for j in range(4 + i % 30)] for i in range(128)]
        together = told(llm, prompts)
        alone = told(llm, prompts[:2])
    assert [len(ids) for ids in together] == [24] * 128
    assert len(alone) == 2
