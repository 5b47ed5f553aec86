"""Linear layers of the GPU on the CPU, over the kernels' references: rounding, joining, formats side by side, weights of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.drive import load
from tests.models.test_int8_model import compressed
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from tests.models.tiny_packed import awq_config, compressed_config, gptq_config, make_packed
from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.machine.gpu_formats import gpu_weight_bytes
from trireme.machine.weight_bytes import stored_of
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda import reference as cuda_reference
from trireme.models.cuda.layers.int8_linear import Int8Linear
from trireme.models.cuda.layers.linear import CudaLinear, DeviceMatrix, Fp8Linear, SideBySide, make_linear
from trireme.models.cuda.layers.packed_linear import Q4Linear
from trireme.models.cuda.layers.quantize import fp8_from, int8_from, q4_k_from
from trireme.models.cuda.weights.shards import own_weights
from trireme.models.cuda.weights.sources import ROUNDED, device_weights
from trireme.models.cuda.weights.staging import Staging
from trireme.models.load import open_weights
from trireme.models.weights.dummy import DummySource
from trireme.models.weights.gguf_expand import dequantize
from trireme.models.weights.packed import quantize_rows
from trireme.models.weights.tp_shards import RankSpans, columns_of
from trireme.topology.mesh import Mesh, Span

CPU = torch.device("cpu")
TWINS = (
    *("skinny_linear", "fp8_linear", "quantize_rows", "expand_q4_k"),
    *("skinny_w4", "expand_w4", "skinny_fp8_blocks", "expand_fp8_blocks"),
    *("block_linear", "block_linear_rows", "expand_blocks", "skinny_int8", "scale_int8"),
)


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernels' twins in their places."""
    torch.manual_seed(0)
    for name in TWINS:
        monkeypatch.setattr(cuda_ops, name, getattr(cuda_reference, name + "_reference"))
    monkeypatch.setattr(cuda_ops, "skinny_max_rows", lambda: 32)
    monkeypatch.setattr(cuda_ops, "fp8_linear_rows", lambda k: 4 if k % 128 == 0 else 0)


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def dense_of(matrix: DeviceMatrix) -> Tensor:
    """The values that a matrix stands for."""
    if matrix.format in cuda_ops.BLOCKS:
        return cuda_reference.block_values(matrix.values, matrix.format)
    if matrix.format.startswith("w4") and matrix.scale is not None:
        return cuda_reference.w4_values(matrix.values, matrix.scale.T)
    if matrix.format == "fp8_blocks" and matrix.scale is not None:
        return cuda_reference.fp8_blocks_values(matrix.values, matrix.scale.T)
    return matrix.values.float() * (1.0 if matrix.scale is None else matrix.scale[:, None])


def test_q4_k_is_what_ggml_reads() -> None:
    weight = torch.randn(6, 512) * torch.linspace(0.1, 3, 6)[:, None]
    weight[0, :32], weight[1, 32:64], weight[2] = 0.0, 5.0, 0.0
    blocks = q4_k_from(weight)
    values = torch.from_numpy(dequantize("Q4_K", blocks.numpy(), 6, 512))
    torch.testing.assert_close(cuda_reference.q4_k_values(blocks), values)
    assert error(values, weight) < 0.08
    assert (values[0, :32] == 0).all()
    assert (values[2] == 0).all()
    again = torch.from_numpy(dequantize("Q4_K", q4_k_from(values).numpy(), 6, 512))
    assert error(again, values) < 0.03


def test_rounding_goes_by_rows_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(7, 512)
    whole = fp8_from(weight), q4_k_from(weight)
    monkeypatch.setattr("trireme.models.cuda.layers.quantize._AT_ONCE", 1024)
    assert torch.equal(q4_k_from(weight), whole[1])
    assert torch.equal(fp8_from(weight)[0].view(torch.uint8), whole[0][0].view(torch.uint8))


@pytest.mark.parametrize("form", list(ROUNDED))
@pytest.mark.parametrize("rows", [3, 40, 150])
@pytest.mark.parametrize("biased", [False, True])
def test_every_format_multiplies(form: str, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.models.cuda.layers.packed_linear._EXPANDED", 512 * 20)  # expanded in several parts
    parts = [ROUNDED[form](torch.randn(n, 512).bfloat16()) for n in (32, 16, 16)]
    bias = torch.randn(64).bfloat16() if biased else None
    linear = make_linear(parts, bias)
    assert not isinstance(linear, SideBySide)
    x = torch.randn(rows, 512).bfloat16()
    expected = x.float() @ torch.cat([dense_of(part) for part in parts]).T + (0 if bias is None else bias.float())
    out = torch.full((rows, 80), float("nan")).bfloat16()
    linear(x, out[:, 8:72])
    assert error(out[:, 8:72], expected) < (0.04 if form == "fp8" and rows > 4 else 0.01)  # (x is rounded, too)
    assert out[:, :8].isnan().all()
    assert out[:, 72:].isnan().all()
    if isinstance(linear, Fp8Linear):
        assert [linear.input_dtype(count) for count in (4, 5)] == [None, torch.float8_e4m3fn]
        narrow, scale = torch.empty(rows, 512, dtype=torch.float8_e4m3fn), torch.empty(rows)
        cuda_ops.quantize_rows(x, narrow, scale)
        applied = linear.forward_quantized(narrow, scale, torch.empty(rows, 64).bfloat16())
        left = torch.empty(rows, 64).bfloat16()
        scales = linear.unscaled(narrow, scale, left)
        assert (scales is None) == (biased or rows > 64)
        if scales is not None:
            left = left * scales.rows[:, None] * scales.columns
        assert error(left, applied) < 0.005


@pytest.mark.parametrize(("hopper_rows", "exact_rows"), [(4, 4), (1, 1), (0, 8)])
def test_rows_of_float8_that_keep_their_bits(
    hopper_rows: int, exact_rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_ops, "fp8_linear_rows", lambda k: hopper_rows)
    matrix = ROUNDED["fp8"](torch.randn(32, 256).bfloat16())
    linear = make_linear([matrix], None)
    assert [linear.input_dtype(count) for count in (exact_rows, exact_rows + 1)] == [None, torch.float8_e4m3fn]
    x = torch.randn(exact_rows + 1, 256).bfloat16()
    for rows, bound in ((exact_rows, 0.004), (exact_rows + 1, 0.04)):
        out = linear(x[:rows], torch.empty(rows, 32).bfloat16())
        found = error(out, x[:rows].float() @ dense_of(matrix).T)
        assert bound / 10 < found < bound


@pytest.mark.parametrize("n", [8, 64, 13])
@pytest.mark.parametrize("biased", [False, True])
def test_int8_is_the_same_whichever_way(n: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows, many, in slices of rows with a short one last, and outputs that torch's product does not take."""
    monkeypatch.setattr("trireme.models.cuda.layers.int8_linear._SUMS", 32 * n)
    monkeypatch.setattr("trireme.models.cuda.layers.int8_linear._ROWS", 32)
    weight, x = torch.randn(n, 80).bfloat16(), torch.randn(135, 80).bfloat16()
    bias = torch.randn(n).bfloat16() if biased else None
    matrix = ROUNDED["int8"](weight)
    assert matrix.scale is not None
    linear = make_linear([matrix], bias)
    assert isinstance(linear, Int8Linear)
    narrow, scale = torch.empty(135, 80, dtype=torch.int8), torch.empty(135)
    cuda_ops.quantize_rows(x, narrow, scale)
    whole = torch.empty(135, n).bfloat16()
    cuda_reference.skinny_int8_reference(narrow, scale, matrix.values, matrix.scale, whole, bias)
    exact = x.float() @ dense_of(matrix).T + (0 if bias is None else bias.float())
    assert error(whole, exact) < 0.012
    for rows in (1, 8, 16, 17, 31, 64, 65, 135):
        out = torch.full((rows, n + 3), float("nan")).bfloat16()
        linear(x[:rows], out[:, 2 : n + 2])
        assert torch.equal(out[:, 2 : n + 2], whole[:rows])
        assert out[:, [0, 1, n + 2]].isnan().all()
        assert linear.input_dtype(rows) == torch.int8
        given = torch.empty(rows, n).bfloat16()
        assert linear.unscaled(narrow[:rows], scale[:rows], given) is None
        assert torch.equal(given, whole[:rows])


def test_int8_is_rounded_as_on_a_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(9, 200)
    weight[2], weight[3], weight[4, 5], weight[5, 7] = 0.0, 1e-31, float("nan"), float("inf")
    kind, raw = quantize_rows("int8", weight.numpy())
    monkeypatch.setattr("trireme.models.cuda.layers.quantize._AT_ONCE", 400)  # in several parts
    values, scale = int8_from(weight)
    assert kind == "INT8"
    np.testing.assert_array_equal(raw[:, 4:].view(np.int8), values.numpy())
    np.testing.assert_array_equal(raw[:, :4].copy().view(np.float32)[:, 0], scale.numpy())


def test_formats_stand_side_by_side() -> None:
    parts = [ROUNDED[form](torch.randn(16, 256).half()) for form in ("q4_k", "q4_k", "half", "fp8")]
    linear, bias = make_linear(parts, None), torch.randn(64).half()
    assert [type(piece) for _, piece in linear._pieces] == [Q4Linear, CudaLinear, Fp8Linear]  # type: ignore[attr-defined]
    x = torch.randn(5, 256).half()
    expected = x.float() @ torch.cat([dense_of(part) for part in parts]).T
    assert error(linear(x, torch.empty(5, 64).half()), expected) < 0.03
    assert error(make_linear(parts, bias)(x, torch.empty(5, 64).half()), expected + bias.float()) < 0.03


# ---------------------------------------------------------------- weights of files

FP8 = {"num_bits": 8, "type": "float", "symmetric": True}


def float8(path: Path, strategy: str, *, suffix: str = "_scale", config: dict[str, Any] | None = None) -> Path:
    """Turns a dense tiny checkpoint into one of float8 with a scale for each tensor, channel or block of 128 x 128."""
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if "_proj.weight" in name]:
        dense = weights[name].float()
        n, k = dense.shape
        if strategy == "block":
            scale = dense.abs().max().expand(-(-n // 128), -(-k // 128)) / 448 * torch.rand(-(-n // 128), -(-k // 128))
            wide = scale.repeat_interleave(128, 0)[:n].repeat_interleave(128, 1)[:, :k]
        else:
            scale = (
                dense.abs().amax(1, keepdim=True) / 448 if strategy == "channel" else dense.abs().max().view(1) / 448
            )
            wide = scale
        weights[name] = (dense / wide).clamp(-448, 448).to(torch.float8_e4m3fn)
        weights[name + suffix] = scale.contiguous()
        if strategy == "tensor":
            weights[name.removesuffix(".weight") + ".input_scale"] = torch.ones(1)
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((path / "config.json").read_text())
    groups = {"group_0": {"targets": ["Linear"], "weights": {**FP8, "strategy": strategy}, "input_activations": FP8}}
    if strategy == "block":
        groups["group_0"]["weights"]["block_structure"] = [128, 128]
    text["quantization_config"] = config or {"quant_method": "compressed-tensors", "config_groups": groups}
    (path / "config.json").write_text(json.dumps(text))
    return path


HF_BLOCKS = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
WIDE = {
    "hidden_size": 256,
    "intermediate_size": 320,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}


@pytest.mark.parametrize(
    ("strategy", "suffix", "config", "kind", "form"),
    [
        ("channel", "_scale", None, "FP8", "fp8"),
        ("tensor", "_scale", {"quant_method": "fp8", "activation_scheme": "static"}, "FP8", "fp8"),
        ("block", "_scale", None, "FP8_BLOCKS", "half"),
        ("block", "_scale_inv", HF_BLOCKS, "FP8_BLOCKS", "half"),
    ],
    ids=["channel", "tensor", "block", "hf block"],
)
def test_float8_checkpoints(
    tmp_path: Path, strategy: str, suffix: str, config: dict[str, Any] | None, kind: str, form: str
) -> None:
    path = float8(make_tiny(tmp_path, dtype="bfloat16", **WIDE), strategy, suffix=suffix, config=config)
    files = find_model(path)
    arch = read_arch(files)
    assert arch.weights_kind == kind
    source = open_weights(files, arch)
    assert not [name for name in source.names() if "scale" in name]
    name = "model.layers.1.mlp.down_proj.weight"
    on_device = device_weights(source, torch.bfloat16, CPU)
    matrix = on_device.factor(name, 256, 320)
    assert matrix.format == form
    whole_blocks = on_device.factor("model.layers.1.mlp.up_proj.weight", 320, 256)
    assert whole_blocks.format == ("fp8_blocks" if strategy == "block" else "fp8")
    stored = load_file(path / "model.safetensors")
    values, scale = stored[name].float(), stored[name + suffix]
    if strategy == "block":
        scale = scale.repeat_interleave(128, 0)[:256].repeat_interleave(128, 1)[:, :320]
    expected = values * scale
    torch.testing.assert_close(dense_of(matrix).float(), expected, rtol=0.004 if form == "half" else 1e-6, atol=1e-7)
    if strategy == "block":
        stored_up, name_up = stored["model.layers.1.mlp.up_proj.weight"].double(), "model.layers.1.mlp.up_proj.weight"
        blocks = stored[name_up + suffix].double().repeat_interleave(128, 0)[:320].repeat_interleave(128, 1)
        np.testing.assert_array_equal(source.matrix(name_up, 320, 256).as_float32(), (stored_up * blocks).float())
        torch.testing.assert_close(
            dense_of(whole_blocks).double(), (stored_up * blocks).float().double(), rtol=0, atol=0
        )
        part = columns_of(source.matrix(name_up, 320, 256), Span(64, 192))  # not at the borders of blocks
        torch.testing.assert_close(
            torch.from_numpy(part.as_float32()), (stored_up * blocks)[:, 64:192].float(), rtol=0.004, atol=0
        )
    # and on the CPU, where every kernel takes the values as 16 bits
    assert source.matrix(name, 256, 320).computable(None).kind in ("F16", "BF16")
    torch.testing.assert_close(
        torch.from_numpy(source.matrix(name, 256, 320).computable(None).as_float32()), expected, rtol=0.004, atol=1e-7
    )
    load(path)


def test_float8_without_scales_is_refused(tmp_path: Path) -> None:
    path = float8(make_tiny(tmp_path, dtype="bfloat16", **WIDE), "channel")
    weights = load_file(path / "model.safetensors")
    del weights["model.layers.1.mlp.up_proj.weight_scale"]
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    files = find_model(path)
    source = open_weights(files, read_arch(files))
    with pytest.raises(ModelError, match=r"up_proj\.weight in .* is of float8 and has no scales"):
        source.matrix("model.layers.1.mlp.up_proj.weight", 320, 256)


def bytes_of_layers(path: Path, scheme: str | None) -> tuple[int, int]:
    """(what the matrices of a model take as they are loaded, what the plan says)."""
    files = find_model(path)
    arch = read_arch(files)
    weights = device_weights(open_weights(files, arch), torch.bfloat16, CPU, scheme=scheme)
    q, kv = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
    shapes = {"self_attn.q_proj": (q, arch.hidden), "self_attn.k_proj": (kv, arch.hidden)}
    shapes |= {"self_attn.v_proj": (kv, arch.hidden), "self_attn.o_proj": (arch.hidden, q)}
    shapes |= {"mlp.gate_proj": (arch.ffn, arch.hidden), "mlp.up_proj": (arch.ffn, arch.hidden)}
    shapes |= {"mlp.down_proj": (arch.hidden, arch.ffn)}
    total = weights.matrix("model.embed_tokens.weight", arch.vocab_size, arch.hidden).nbytes
    if not arch.tie_embeddings:
        total += weights.factor("lm_head.weight", arch.vocab_size, arch.hidden).nbytes
    for layer in range(arch.num_layers):
        for name, (n, k) in shapes.items():
            total += weights.factor(f"model.layers.{layer}.{name}.weight", n, k).nbytes
    return total, gpu_weight_bytes(ModelConfig(model=str(path), quantize=scheme), arch, stored_of(files))


@pytest.mark.parametrize(
    ("config", "form"),
    [
        (gptq_config(group=128, sym=True), "w4_128"),
        (gptq_config(group=64), "w4_64"),
        (awq_config(32), "w4_32"),
        (compressed_config(group=128), "w4_128"),
        (gptq_config(group=128, desc_act=True), "half"),
    ],
    ids=str,
)
def test_packed_checkpoints(config: dict[str, Any], form: str, tmp_path: Path) -> None:
    """What lies on the device has the very values of the file; widths that no group divides are expanded."""
    path, dense = make_packed(tmp_path, config, hidden_size=256)
    files, twin = find_model(path), load_file(dense / "model.safetensors")
    source = open_weights(files, read_arch(files))
    for name, (n, k) in {"up_proj": (320, 256), "down_proj": (256, 320)}.items():
        whole = f"model.layers.1.mlp.{name}.weight"
        matrix = device_weights(source, torch.float32, CPU).factor(whole, n, k)
        assert matrix.format == (form if k == 256 else "half")
        torch.testing.assert_close(dense_of(matrix), twin[whole], rtol=0, atol=0)


BLOCKS = {**WIDE, "intermediate_size": 512}


@pytest.mark.parametrize("scheme", [None, "fp8", "int8", "q4_k"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_plan_counts_what_a_load_takes(tmp_path: Path, scheme: Any, tied: bool) -> None:
    path = make_tiny(tmp_path, dtype="bfloat16", tie_word_embeddings=tied, **BLOCKS)
    taken, planned = bytes_of_layers(path, scheme)
    assert planned <= taken < planned * 1.02, "scales are not counted"


@pytest.mark.parametrize("config", [gptq_config(group=128), awq_config(64), gptq_config(desc_act=True)], ids=str)
def test_the_plan_counts_packed_checkpoints(config: dict[str, Any], tmp_path: Path) -> None:
    path, _ = make_packed(tmp_path, config, **BLOCKS)
    taken, planned = bytes_of_layers(path, None)
    assert taken == planned


def test_the_plan_counts_blocks_of_float8(tmp_path: Path) -> None:
    path = float8(make_tiny(tmp_path, dtype="bfloat16", **BLOCKS), "block", suffix="_scale_inv", config=HF_BLOCKS)
    taken, planned = bytes_of_layers(path, None)
    assert planned <= taken < planned * 1.02


@pytest.mark.parametrize("scheme", [None, "fp8"])
def test_the_plan_counts_mixed_blocks(tmp_path: Path, scheme: Any) -> None:
    path = make_tiny(tmp_path, **BLOCKS)
    kinds = {"ffn_down.weight": "Q8_0", "token_embd.weight": "Q8_0", "output.weight": "F16"}
    file = gguf_from_directory(path, path / "model.gguf", "Q4_K", kinds=kinds)
    taken, planned = bytes_of_layers(file, scheme)
    assert planned <= taken < planned * 1.02
    stored = stored_of(find_model(file))
    assert stored is not None
    assert set(stored.weights) == {"Q4_K", "Q8_0"} | ({"F16"} if "F16" in stored.weights else set())


def test_blocks_come_as_they_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make_tiny(tmp_path, **BLOCKS)
    file = gguf_from_directory(path, path / "model.gguf", "Q4_K", kinds={"token_embd.weight": "Q8_0"})
    files = find_model(file)
    source = open_weights(files, read_arch(files))
    name = "model.layers.0.mlp.gate_proj.weight"
    matrix = device_weights(source, torch.bfloat16, CPU).factor(name, 512, 256)
    assert (matrix.format, matrix.values.shape) == ("q4_k", (512, 144))
    np.testing.assert_array_equal(dense_of(matrix).numpy(), source.matrix(name, 512, 256).as_float32())
    monkeypatch.setattr(
        "trireme.models.cuda.weights.sources._EXPANDED", 256 * 30
    )  # others are expanded, in several parts
    name = "model.embed_tokens.weight"
    found = device_weights(source, torch.float32, CPU).matrix(name, 320, 256)
    np.testing.assert_array_equal(found.numpy(), source.matrix(name, 320, 256).as_float32())


@pytest.mark.parametrize("piece", [1, 100, 1 << 20])
def test_rows_are_sent_piece_by_piece(piece: int) -> None:
    rows = np.random.default_rng(0).integers(0, 256, (37, 60), dtype=np.uint8)
    staging = Staging(CPU, piece=piece, threads=3)
    for part in (rows, rows[:, 4:], rows[::2], rows[:0]):
        np.testing.assert_array_equal(staging.send(part).numpy(), part)
    assert staging.sent_bytes == 37 * 60 + 37 * 56 + 19 * 60
    staging.close()


@pytest.mark.parametrize(("scheme", "dtype"), [("fp8", torch.float8_e4m3fn), ("int8", torch.int8)])
def test_dummy_weights_are_rounded_too(scheme: str, dtype: torch.dtype, tmp_path: Path) -> None:
    files = find_model(make_tiny(tmp_path, dtype="bfloat16", **BLOCKS))
    source = DummySource(read_arch(files), (), files.path)
    matrix = device_weights(source, torch.bfloat16, CPU, scheme=scheme).factor("x.weight", 32, 256)
    assert matrix.values.dtype == dtype
    assert error(dense_of(matrix), device_weights(source, torch.bfloat16, CPU).matrix("x.weight", 32, 256)) < 0.04


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_int8_checkpoints(strategy: str, tmp_path: Path) -> None:
    """The very codes and scales of the file, whole and in the shares of two ranks; the ends keep 16 bits."""
    path = compressed(make_tiny(tmp_path, **BLOCKS), strategy)
    files, stored = find_model(path), load_file(path / "model.safetensors")
    arch = read_arch(files)
    source = open_weights(files, arch)
    name = "model.layers.0.mlp.down_proj.weight"
    scale = stored[name + "_scale"].view(-1).expand(256)
    matrix = device_weights(source, torch.bfloat16, CPU).factor(name, 256, 512)
    assert matrix.format == "int8"
    assert matrix.scale is not None
    assert torch.equal(matrix.values, stored[name])
    assert torch.equal(matrix.scale, scale)
    assert device_weights(source, torch.bfloat16, CPU).factor("lm_head.weight", 320, 256).format == "half"
    halves = []
    for rank in range(2):
        shares = RankSpans(arch, Mesh(1, 1, 2).at_worker(rank))
        own = own_weights(source, torch.bfloat16, CPU, shares)
        halves.append(own.factor(name, 256, 256))
        rows = own.factor("model.layers.0.mlp.up_proj.weight", 256, 256)
        up = stored["model.layers.0.mlp.up_proj.weight"]
        assert torch.equal(rows.values, up[shares.ffn.start : shares.ffn.stop])
    assert torch.equal(torch.cat([half.values for half in halves], 1), stored[name])
    assert all(torch.equal(half.scale, scale) for half in halves if half.scale is not None)
    taken, planned = bytes_of_layers(path, None)
    assert planned <= taken < planned * 1.02, "scales are not counted"
