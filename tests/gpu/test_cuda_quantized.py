"""Rounded weights and caches on a GPU: products of every format, whole models near the same values in 16 bits, and the engine over
GGUF files, the real ones where they are installed, against the CPU."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.gpu.test_cuda_model import MARGIN, GpuDriver, error, load_on_gpu, logits_of, write_model
from tests.gpu.test_cuda_ops import poisoned
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme import LLM, SamplingParams
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.models.cuda import ops, reference
from trireme.models.cuda.layers.linear import Fp8Linear, make_linear
from trireme.models.cuda.layers.quantize import fp8_from, q4_k_from
from trireme.models.cuda.weights.sources import ROUNDED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
HALF = [torch.float16, torch.bfloat16]
FORMATS = ("half", "fp8", "q4_k")
EXACT = {torch.float16: 0.002, torch.bfloat16: 0.01}


def dense_of(form: str, weight: Tensor) -> Tensor:
    """The values that a rounded weight stands for, float32."""
    if form == "q4_k":
        return reference.q4_k_values(q4_k_from(weight))
    if form == "fp8":
        values, scale = fp8_from(weight)
        return values.float() * scale[:, None]
    return weight.float()


@pytest.mark.parametrize("dtype", HALF)
def test_expand_q4_k(dtype: torch.dtype) -> None:
    blocks = q4_k_from(torch.randn(37, 768, device="cuda"))
    expected = reference.q4_k_values(blocks)
    found = ops.expand_q4_k(blocks, poisoned(37, 768, dtype=dtype))
    torch.testing.assert_close(found.float(), expected, rtol=EXACT[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("ways", [0, 1, 2, 4, 8])
def test_q4_k_by_any_number_of_ways(dtype: torch.dtype, ways: int) -> None:
    """n is no multiple of a block's outputs, and 3 super-blocks are not one for each of 8 warps. Where the number is chosen, few
    rows are rounded to int8."""
    weight, bias = q4_k_from(torch.randn(200, 768, device="cuda")), torch.randn(200, device="cuda").to(dtype)
    for rows in (1, 8, 9, 16, 17, 32):
        x = torch.randn(rows, 768, device="cuda").to(dtype)
        exact = torch.empty(rows, 200, device="cuda", dtype=torch.float64)
        is_rounded = ways == 0 and rows <= ops.Q4_K_INT8_ROWS
        reference.skinny_linear_reference(reference.int8_runs(x) if is_rounded else x, weight, exact, bias)
        found = ops.skinny_linear(x, weight, poisoned(rows, 200, dtype=dtype), bias, ways=ways)
        assert error(found, exact) < EXACT[dtype]


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("forms", [("fp8", "fp8"), ("q4_k", "q4_k"), ("q4_k", "half"), ("half", "fp8")], ids=str)
@pytest.mark.parametrize("rows", [1, 5, 32, 33, 100, 200])
def test_products_of_every_format(dtype: torch.dtype, forms: tuple[str, ...], rows: int) -> None:
    weights = [torch.randn(n, 512, device="cuda").to(dtype) * 0.05 for n in (144, 64)]
    bias, x = torch.randn(208, device="cuda").to(dtype), torch.randn(rows, 512, device="cuda").to(dtype)
    linear = make_linear([ROUNDED[form](weight) for form, weight in zip(forms, weights, strict=True)], bias)
    values = torch.cat([dense_of(form, weight) for form, weight in zip(forms, weights, strict=True)])
    expected = x.double() @ values.double().T + bias.double()
    if rows <= ops.Q4_K_INT8_ROWS and "q4_k" in forms:
        bound = 0.01 + EXACT[dtype]  # int8 by runs errs by 0.005 of normal values
    else:
        bound = 0.04 if "fp8" in forms else EXACT[dtype]  # many rows of x are rounded to float8
    found = linear(x, poisoned(rows, 208, dtype=dtype))
    assert error(found, expected) < bound


@pytest.mark.parametrize("dtype", HALF)
def test_inputs_that_are_float8_already(dtype: torch.dtype) -> None:
    weight, x = torch.randn(64, 512, device="cuda").to(dtype), torch.randn(70, 512, device="cuda").to(dtype)
    linear = Fp8Linear(*fp8_from(weight), None)
    assert linear.input_dtype(9) == torch.float8_e4m3fn
    for rows in (3, 9, 16, 17, 32, 70):
        narrow, scale = (
            torch.empty(rows, 512, device="cuda", dtype=torch.float8_e4m3fn),
            torch.empty(rows, device="cuda"),
        )
        ops.quantize_rows(x[:rows], narrow, scale)
        expected = (narrow.double() * scale.double()[:, None]) @ dense_of("fp8", weight).double().T
        assert error(linear.forward_quantized(narrow, scale, poisoned(rows, 64, dtype=dtype)), expected) < 0.005
        left = poisoned(rows, 64, dtype=dtype)
        scales = linear.unscaled(narrow, scale, left)
        assert (scales is None) == (dtype != torch.bfloat16 or rows > 64)
        if scales is not None:
            left = left.double() * scales.rows[:, None] * scales.columns
        assert error(left, expected) < 0.005


# ---------------------------------------------------------------- whole models


def rounded_twin(twin: Any, form: str) -> Any:
    """A float32 model whose layers have the values that `form` rounds them to."""
    same = copy.deepcopy(twin)
    with torch.no_grad():
        for name, parameter in same.named_parameters():
            if "_proj.weight" in name and parameter.shape[1] % (256 if form == "q4_k" else 64) == 0:
                parameter.copy_(dense_of(form, parameter.bfloat16()))
    return same


@pytest.mark.parametrize(
    ("form", "family"), [("fp8", "llama"), ("fp8", "qwen3"), ("fp8", "granite-divided"), ("q4_k", "llama")]
)
def test_rounded_models(form: str, family: str, tmp_path: Path) -> None:
    """One token at a time the activations keep 16 bits; prompts of many round them to float8, too, which errs by 0.03 a product."""
    _, twin = write_model(family, tmp_path)
    twin = rounded_twin(twin, form)
    model = load_on_gpu(tmp_path, scheme=form)
    prompt = torch.randint(0, 512, (90,)).tolist()
    expected, halves = (logits_of(each, [prompt])[0] for each in (twin, copy.deepcopy(twin).bfloat16()))
    driver = GpuDriver(model, 1, 128)
    many = driver.step([(0, prompt[:60])], all_logits=True)
    assert many is not None
    # a Q4_K value is rounded to 16 bits after scale and minimum were, which adds to what 16 bits err by
    bound = {"fp8": MARGIN, "q4_k": 2.0}[form] * error(halves, expected)
    assert error(many, expected[:60]) < (0.15 if form == "fp8" else bound)
    driver = GpuDriver(model, 1, 128)
    few = torch.cat([driver.step([(0, [token])]) for token in prompt])
    # inputs of Q4_K rounded to int8 err by 0.005 a product
    assert error(few, expected) < bound + (0.03 if form == "q4_k" else 0.0)


def test_a_cache_of_float8(tmp_path: Path) -> None:
    """Prompts in chunks and single tokens read what was written; it errs by what e4m3 does."""
    _, twin = write_model("llama", tmp_path)
    model = load_on_gpu(tmp_path, kv_dtype=torch.float8_e4m3fn)
    prompt = torch.randint(0, 512, (90,)).tolist()
    expected = logits_of(twin, [prompt])[0]
    driver = GpuDriver(model, 1, 128)
    assert driver.kv[0].k.dtype == torch.float8_e4m3fn
    first = driver.step([(0, prompt[:40])], all_logits=True)
    rest = driver.step([(0, prompt[40:89])], all_logits=True)
    last = driver.step([(0, prompt[89:])])
    assert first is not None
    assert rest is not None
    assert last is not None
    assert error(torch.cat((first, rest, last)), expected) < 0.06
    assert error(last[0], expected[-1]) < 0.06


# ---------------------------------------------------------------- the engine

GREEDY = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
PROMPTS = [[(7 * i + 3 * j) % 250 for j in range(4 + 13 * i)] for i in range(5)]


def told(llm: LLM, prompts: Any) -> list[list[int]]:
    return [list(output.outputs[0].token_ids) for output in llm.generate(prompts, GREEDY, progress=False)]


def same_as_on_the_cpu(model: Path | str, prompts: Any, tie: float, **settings: Any) -> None:
    """Where two greedy answers part, the CPU must find the two tokens' log-probabilities within `tie` of the distance between its
    first and its twentieth token: kernels of the CPU round their inputs to 8 bits, those of the GPU theirs to bfloat16."""
    with LLM(model, device="cuda", max_len=512, max_num_seqs=8, kv_memory="256MiB", **settings) as llm:
        assert llm.config.parallel.device == "cuda"
        mine = told(llm, prompts)
    with LLM(model, device="cpu", max_len=512, threads=4) as llm:
        outputs = llm.generate(prompts, GREEDY, progress=False)
        for output, a in zip(outputs, mine, strict=True):
            prompt, b = output.prompt_token_ids, list(output.outputs[0].token_ids)
            if a == b:
                continue
            at = next(i for i in range(len(a)) if a[i] != b[i])
            scored = SamplingParams(max_tokens=1, temperature=0, logprobs=20)
            (again,) = llm.generate([[*prompt, *b[:at]]], scored, progress=False)
            of = dict((again.outputs[0].logprobs or ())[0].top)
            assert a[at] in of, (at, a[at], b[at])
            assert of[b[at]] - of[a[at]] < tie * (max(of.values()) - min(of.values()))


SHAPE = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
STEP_COLUMNS = {"ffn_down.weight": "Q8_0", "attn_v.weight": "Q5_0", "token_embd.weight": "Q8_0"}


@pytest.mark.parametrize("settings", [{}, {"quantize": "fp8"}, {"kv_dtype": "fp8"}], ids=str)
def test_gguf_through_the_engine(settings: dict[str, str], tmp_path: Path) -> None:
    path = make_tiny(tmp_path, vocab_size=512, max_position_embeddings=1024, **SHAPE)
    file = gguf_from_directory(path, tmp_path / "m.gguf", "Q4_K", kinds=STEP_COLUMNS)
    same_as_on_the_cpu(file, PROMPTS, 0.6 if settings else 0.15, **settings)


@pytest.mark.parametrize("scheme", ["fp8", "q4_k"])
def test_rounding_while_loading_dummies(scheme: str, tmp_path: Path) -> None:
    path = make_tiny(tmp_path, dtype="bfloat16", vocab_size=512, max_position_embeddings=1024, **SHAPE)
    with LLM(path, device="cuda", load_format="dummy", quantize=scheme, kv_memory="64MiB") as llm:
        assert [len(ids) for ids in told(llm, PROMPTS)] == [24] * len(PROMPTS)


@pytest.mark.parametrize("name", ["smollm2", "gemma3-270m"])
def test_packaged_models(name: str) -> None:
    try:
        find_model(name)
    except ModelError as error:
        pytest.skip(error.message)
    same_as_on_the_cpu(name, ["The capital of France is", "Water boils at", "Once upon a time, there was a small"], 0.1)
