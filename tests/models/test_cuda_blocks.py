"""GGUF's blocks as a GPU has them: no value changes in the new layout, and plan and kernels agree on the bytes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from tests.models.block_rows import FACTORS, block_rows
from tests.models.test_cuda_linear import BLOCKS, CPU, TWINS, bytes_of_layers, error
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme.machine.gpu_formats import FORMATS, OF_BLOCKS
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda import reference as cuda_reference
from trireme.models.cuda.layers.linear import LINEARS, DeviceMatrix, make_linear
from trireme.models.cuda.layers.packed_linear import BlockLinear
from trireme.models.cuda.weights.gguf_blocks import laid_out
from trireme.models.cuda.weights.sources import device_weights
from trireme.models.load import open_weights
from trireme.models.weights.gguf_expand import dequantize


@pytest.fixture(autouse=True)
def _references(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    for name in TWINS:
        monkeypatch.setattr(cuda_ops, name, getattr(cuda_reference, name + "_reference"))
    monkeypatch.setattr(cuda_ops, "skinny_max_rows", lambda: 32)


def test_all_agree_on_the_types() -> None:
    assert set(FACTORS) == set(OF_BLOCKS)
    assert set(OF_BLOCKS.values()) == set(cuda_ops.BLOCKS)
    for form, nbytes in cuda_ops.BLOCK_BYTES.items():
        assert FORMATS[form].weight * cuda_ops.BLOCK_VALUES == nbytes
        assert FORMATS[form].unit == cuda_ops.BLOCK_VALUES
        assert nbytes % 16 == 0
        assert form in LINEARS


@pytest.mark.parametrize("kind", list(OF_BLOCKS))
@pytest.mark.parametrize("at_once", [256, 1 << 25])
def test_no_value_changes(kind: str, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trireme.models.cuda.weights.gguf_blocks._AT_ONCE", at_once)
    raw, form = block_rows(kind, 5, 768), OF_BLOCKS[kind]
    found = laid_out(kind, torch.from_numpy(raw), 768)
    assert found.shape == (5, 3 * cuda_ops.BLOCK_BYTES[form])
    assert found.is_contiguous()
    expected = torch.from_numpy(dequantize(kind, raw, 5, 768))
    torch.testing.assert_close(cuda_reference.block_values(found, form), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", [kind for kind in OF_BLOCKS if kind != "Q4_K"])
@pytest.mark.parametrize("rows", [1, 4, 7, 30, 200])
@pytest.mark.parametrize("biased", [False, True])
def test_products(kind: str, rows: int, biased: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of one type become one matrix; few rows are rounded, many meet the values."""
    monkeypatch.setattr("trireme.models.cuda.layers.packed_linear._EXPANDED", 512 * 20)
    form = OF_BLOCKS[kind]
    raw = [block_rows(kind, n, 512, seed) for seed, n in enumerate((30, 15))]
    values = torch.cat([torch.from_numpy(dequantize(kind, part, len(part), 512)) for part in raw])
    parts = [DeviceMatrix(form, laid_out(kind, torch.from_numpy(part), 512)) for part in raw]
    bias = torch.randn(45).bfloat16() if biased else None
    linear = make_linear(parts, bias)
    assert isinstance(linear, BlockLinear)
    x, out = torch.randn(rows, 512).bfloat16(), torch.full((rows, 60), float("nan")).bfloat16()
    linear(x, out[:, 8:53])
    rounded = x.float() if rows > linear._limits()[1] else cuda_reference.int8_runs(x)
    exact, expected = (part @ values.T + (0 if bias is None else bias.float()) for part in (x.float(), rounded))
    assert error(out[:, 8:53], expected) < 0.005
    assert error(out[:, 8:53], exact) < 0.02
    assert out[:, :8].isnan().all()
    assert out[:, 53:].isnan().all()


def test_where_expansion_begins() -> None:
    """Q8_0 read 4 times is 4.25 bytes a weight; once, with 16 bits written and read, 5.06; read 5 times it would be 5.3."""
    for form, most in (("q8_0", 16), ("q6_k", 20), ("q5_k", 24), ("q4_0", 32)):
        linear = BlockLinear(form, torch.zeros(4, cuda_ops.BLOCK_BYTES[form], dtype=torch.uint8), None)
        assert linear._limits()[1] == most


@pytest.mark.parametrize("kind", ["Q8_0", "Q5_0", "Q4_1"])
def test_a_file_is_counted_and_loaded(kind: str, tmp_path: Path) -> None:
    path = make_tiny(tmp_path, **BLOCKS)
    file = gguf_from_directory(path, path / "model.gguf", kind, kinds={"token_embd.weight": "F16"})
    taken, planned = bytes_of_layers(file, None)
    assert taken == planned
    files = find_model(file)
    source = open_weights(files, read_arch(files))
    name = "model.layers.0.mlp.gate_proj.weight"
    matrix = device_weights(source, torch.bfloat16, CPU).factor(name, 512, 256)
    assert matrix.format == OF_BLOCKS[kind]
    values = cuda_reference.block_values(matrix.values, matrix.format)
    np.testing.assert_allclose(values.numpy(), source.matrix(name, 512, 256).as_float32(), rtol=1e-6, atol=1e-7)
