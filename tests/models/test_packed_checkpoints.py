"""Checkpoints of packed integers: every value exactly that of the file, kinds and bytes in memory, whole models against those of
transformers on the values that the codes stand for, ranks, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.drive import RankedModel, greedy, load, logits_of
from tests.models.test_int8_model import matrix_kinds, rms
from tests.models.test_parity import LOGITS_BOUND, PROMPTS, assert_parity, reference, reference_logits
from tests.models.tiny_packed import awq_config, compressed_config, gptq_config, make_packed, packed_words
from trireme import LLM, SamplingParams
from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.launch.cli import main
from trireme.machine.weight_bytes import loaded_bytes, stored_bytes
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.load import open_weights
from trireme.models.weights.grouped import Grouped, cpu_rows, narrower, rows_of
from trireme.models.weights.packed import GROUPED
from trireme.models.weights.sources import RawMatrix
from trireme.models.weights.tp_shards import columns_of
from trireme.topology.mesh import Span

TEXT = [(7 * i * i + 11 * i) % 250 + 5 for i in range(60)]
CASES: dict[str, tuple[dict[str, Any], str, str]] = {  # config, kind as read from down_proj (320 inputs), and on a CPU
    "gptq": (gptq_config(), "W4_32", "Q5_0"),
    "gptq 64": (gptq_config(group=64), "W4_64", "Q5_0"),
    "gptq 128": (gptq_config(group=128), "W4_64", "Q5_0"),  # 128 does not divide 320: the last group is half a one
    "gptq row": (gptq_config(group=-1), "W4_64", "Q5_0"),
    "gptq sym": (gptq_config(group=32, sym=True), "W4_32", "Q4_0"),
    "gptq v2": (gptq_config(checkpoint_format="gptq_v2"), "W4_32", "Q5_0"),
    "gptq act": (gptq_config(desc_act=True), "F32", "F32"),
    "gptq act row": (gptq_config(group=-1, desc_act=True), "W4_64", "Q5_0"),
    "gptq 8": (gptq_config(8), "F32", "F32"),  # zeros beyond a signed byte
    "gptq 8 sym": (gptq_config(8, sym=True), "Q8_0", "Q8_0"),
    "gptq 8 act": (gptq_config(8, sym=True, desc_act=True), "F32", "F32"),
    "awq": (awq_config(), "W4_32", "Q5_0"),
    "awq 64": (awq_config(64), "W4_64", "Q5_0"),
    "compressed": (compressed_config(), "W4_32", "Q4_0"),
    "compressed asym": (compressed_config(sym=False), "W4_32", "Q5_0"),
    "compressed row": (compressed_config(group=-1), "W4_64", "Q4_0"),
    "compressed act": (compressed_config(actorder="group"), "F32", "F32"),
    "compressed 8": (compressed_config(8), "Q8_0", "Q8_0"),
}


@pytest.mark.parametrize("case", list(CASES))
def test_every_value_is_that_of_the_file(case: str, tmp_path: Path) -> None:
    config, kind, on_cpu = CASES[case]
    packed, dense = make_packed(tmp_path, config, biases=case == "gptq")
    files = find_model(packed)
    source = open_weights(files, read_arch(files))
    twin = load_file(dense / "model.safetensors")
    assert source.names() == set(twin)
    for name in [name for name in twin if "_proj.weight" in name]:
        matrix = source.matrix(name, *twin[name].shape)
        if name.endswith("down_proj.weight"):
            assert (matrix.kind, matrix.computable(None).kind) == (kind, on_cpu)
        for each in (matrix, matrix.computable(None), matrix.rows(Span(8, 24)).computable(None)):
            expected = twin[name].double().numpy()
            found = each.as_float32().astype(np.float64)
            np.testing.assert_array_equal(found, expected if each.n == matrix.n else expected[8:24])


def rounding_inputs(path: Path) -> Any:
    """transformers, the inputs of whose layers are rounded to 8 bits for each 32 of them."""
    model = reference(path)

    def rounded(x: Tensor) -> Tensor:
        runs = x.unflatten(-1, (-1, 32))
        step = runs.abs().amax(-1, keepdim=True) / 127
        return (torch.round(runs / step) * step).flatten(-2)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    return model


@pytest.mark.parametrize("case", list(CASES))
def test_whole_models_are_those_of_transformers(case: str, tmp_path: Path) -> None:
    """Kernels of blocks round their inputs to 8 bits: the logits are nearer to an emulation of that than it is to the exact ones,
    and the first ones are nearly the same. Of float32 every logit and token is the same."""
    config, _, on_cpu = CASES[case]
    packed, dense = make_packed(tmp_path, config)
    model = load(packed)
    if on_cpu == "F32":
        expected = reference(dense)
        torch.testing.assert_close(logits_of(model, TEXT), reference_logits(expected, TEXT), rtol=0, atol=LOGITS_BOUND)
        assert greedy(model, PROMPTS, 8) == greedy(load(dense), PROMPTS, 8)
        assert_parity(dense, model)
        return
    assert on_cpu in matrix_kinds(model)
    logits = logits_of(model, TEXT)
    exact, emulated = (reference_logits(each, TEXT) for each in (reference(dense), rounding_inputs(dense)))
    away = rms(emulated - exact)
    assert (logits - emulated)[:4].abs().max() < 0.1 * away
    assert rms(logits - emulated) < 0.7 * away
    assert 0 < rms(logits - exact) < 1.1 * away


@pytest.mark.parametrize("case", ["gptq 128", "gptq act", "gptq 8 sym", "awq"])
def test_ranks_change_no_bit(case: str, tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, CASES[case][0])
    assert torch.equal(logits_of(RankedModel(packed, tp=2, pp=1), TEXT), logits_of(load(packed), TEXT))


@pytest.mark.parametrize("case", ["gptq 128", "gptq sym", "gptq act", "gptq 8 sym", "awq", "compressed"])
@pytest.mark.parametrize("tied", [False, True])
def test_the_plan_counts_what_a_load_takes(case: str, tied: bool, tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, CASES[case][0], tie_word_embeddings=tied)
    files = find_model(packed)
    weights = load(packed).weights
    ends = {id(end): end.nbytes for end in (weights.head, weights.embedding)}
    taken = sum(layer.nbytes for layer in weights.layers) + sum(ends.values())
    planned = loaded_bytes(ModelConfig(model=str(packed)), read_arch(files), stored_bytes(files)[0])
    assert taken == pytest.approx(planned, rel=0.01)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_an_engine_over_one_and_two_ranks(method: str, tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, CASES[method][0])
    params = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    told = []
    for tp in (1, 2):
        with LLM(packed, device="cpu", max_len=128, tp=tp, threads=1, kv_memory="16MiB") as llm:
            told.append([list(o.outputs[0].token_ids) for o in llm.generate(PROMPTS, params, progress=False)])
    assert told[0] == told[1] == greedy(load(packed), PROMPTS, 12)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_commands_know_them(method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed, _ = make_packed(tmp_path, CASES[method][0])
    assert main(["plan", str(packed), "--json"]) == 0
    shares = json.loads(capsys.readouterr().out)["memory"]
    ends, inside = 2 * 320 * 128 * 4, 2 * (128 * 128 * 2 + 64 * 128 * 2 + 3 * 320 * 128) * 22 / 32
    assert shares[0]["what"] == "weights"
    assert shares[0]["total"] == pytest.approx(ends + inside, rel=0.01)
    assert main(["models", "inspect", str(packed), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["supported"]
    assert facts["shape"]["packing"]["method"] == method


# ---------------------------------------------------------------- blocks


@given(st.integers(0, 1 << 32), st.sampled_from([(32, 96), (64, 192), (128, 384), (96, 192)]), st.booleans())
def test_blocks_hold_every_code_scale_and_zero(seed: int, shape: tuple[int, int], even: bool) -> None:
    rng = np.random.default_rng(seed)
    group, k = shape
    groups, n = k // group, 5
    codes = rng.integers(0, 16, (n, k), dtype=np.uint8)
    zeros = np.full((n, groups), 8, np.uint8) if even else rng.integers(0, 16, (n, groups), dtype=np.uint8)
    scales = rng.uniform(-1, 1, (n, groups)).astype(np.float16).astype(np.float32)
    packed = packed_words(codes, 4).view(np.uint8)
    matrix = Grouped(4, packed, scales, zeros, np.arange(k) // group)
    exact = (codes.astype(np.float64) - zeros.repeat(group, 1)) * scales.astype(np.float64).repeat(group, 1)
    np.testing.assert_array_equal(matrix.codes(), codes)
    np.testing.assert_array_equal(matrix.values(), exact)
    kind, raw = rows_of(matrix)
    assert GROUPED[kind] == (32 if group == 96 else group)
    forms = [(kind, raw), cpu_rows(kind, raw), *([] if GROUPED[kind] == 32 else [narrower(kind, raw, 32)])]
    for each in forms:
        np.testing.assert_array_equal(RawMatrix(*each, n, k).as_float32(), exact)
    part = columns_of(RawMatrix(kind, raw, n, k), Span(32, k - 32))
    np.testing.assert_array_equal(part.as_float32(), exact[:, 32 : k - 32])


def test_scales_that_float16_lacks_are_kept() -> None:
    matrix = Grouped(4, np.full((1, 16), 0x31, np.uint8), np.float32([[1e-9]]), np.uint8([[2]]), np.zeros(32, np.intp))
    kind, raw = rows_of(matrix)
    assert kind == "F32"
    np.testing.assert_array_equal(RawMatrix(kind, raw, 1, 32).as_float32()[0, :2], np.float32([-1e-9, 1e-9]))


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (gptq_config(3), r"bits 3 .*supported: 4 or 8"),
        (gptq_config(group=100), r"group_size 100 .*supported: -1 or 32 or 64 or 128"),
        (gptq_config(checkpoint_format="marlin"), r"checkpoint_format 'marlin'"),
        (gptq_config(dynamic={"+:.*down.*": {"bits": 8}}), "dynamic"),
        (gptq_config(desc_act="yes"), "desc_act 'yes'"),
        (awq_config(version="gemv"), r"version 'gemv' .*supported: 'gemm'"),
        (awq_config(bits=8), "bits 8"),
        (awq_config(zero_point=False), "zero_point False"),
        (awq_config(group_size=None), "group_size None"),
        (compressed_config(strategy="tensor"), "strategy 'tensor'"),
        (compressed_config(num_bits=2), "num_bits 2"),
        ({**compressed_config(), "config_groups": {}}, "config_groups {}"),
        ({**compressed_config(), "kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme {'num_bits': 8}"),
        ({**compressed_config(), "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
        ({**compressed_config(), "sparsity_config": {"format": "sparse-24"}}, "format 'sparse-24'"),
    ],
)
def test_other_packings_are_refused(config: dict[str, Any], message: str, tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, CASES["gptq"][0])
    text = (packed / "config.json").read_text()
    (packed / "config.json").write_text(json.dumps({**json.loads(text), "quantization_config": config}))
    with pytest.raises(ModelError, match=message):
        load(packed)


@pytest.mark.parametrize(
    ("part", "change", "message"),
    [
        ("qweight", lambda x: x[:-1], r"up_proj.qweight .* has shape"),
        ("qweight", lambda x: x.float(), r"qweight .* has dtype F32; supported: I32"),
        ("qzeros", lambda x: None, r"lacks .*up_proj.qzeros"),
        ("scales", lambda x: x[:, :-8], r"up_proj.scales .* has shape"),
        ("scales", lambda x: x * float("inf"), "not finite"),
        ("g_idx", lambda x: x + 1, r"names groups 1 to 4; there are 4"),
    ],
)
def test_broken_tensors_are_named(part: str, change: Any, message: str, tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, CASES["gptq"][0])
    weights = load_file(packed / "model.safetensors")
    name = f"model.layers.1.mlp.up_proj.{part}"
    changed = change(weights.pop(name))
    if changed is not None:
        weights[name] = changed.contiguous()
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=message):
        load(packed)


def test_a_bias_that_is_not_zero_is_not_left_out(tmp_path: Path) -> None:
    packed, _ = make_packed(tmp_path, CASES["gptq"][0], biases=True)
    load(packed)
    weights = load_file(packed / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.bias"][3] = 0.5
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ModelError, match=r"does not use: model.layers.0.mlp.up_proj.bias"):
        load(packed)
