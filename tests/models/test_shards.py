"""One rank's share of every weight: parts make up the whole, partial sums add up, no block of values is cut in two."""

from __future__ import annotations

from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch

from tests.unit.test_resolve import SMOL
from trireme.errors import ConfigError
from trireme.model.spec import ArchSpec
from trireme.models.cpu.stage_weights import weight_names
from trireme.models.cuda.weights.shards import NoiseShards, own_weights
from trireme.models.cuda.weights.sources import NoiseWeights
from trireme.models.weights.dummy import DummySource
from trireme.models.weights.packed import quantize_rows
from trireme.models.weights.sources import RawMatrix, raw_from_floats
from trireme.models.weights.tp_shards import RankSpans, ShardSource, columns_of
from trireme.topology.mesh import Mesh, Span

CPU = torch.device("cpu")


def arch_of(**changes: object) -> ArchSpec:
    sizes = {
        "hidden": 48,
        "num_heads": 6,
        "num_kv_heads": 3,
        "head_dim": 8,
        "ffn": 80,
        "vocab_size": 50,
        "num_layers": 2,
    }
    biases = {"qkv_bias": True, "o_bias": True, "mlp_bias": True}
    return msgspec.structs.replace(SMOL, **{**sizes, **biases, **changes})


class Stored:
    """Random matrices and vectors by name."""

    path = Path()

    def names(self) -> set[str]:
        return set()

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        values = np.random.default_rng(len(name)).standard_normal((n, k), np.float32)
        return raw_from_floats(values, "BF16")

    def vector(self, name: str, size: int) -> np.ndarray:
        return np.random.default_rng(len(name)).standard_normal(size, np.float32)


def whole_shape(arch: ArchSpec, name: str) -> tuple[int, int]:
    cut = RankSpans(arch, Mesh(1, 1, 1)).cut(name)
    return cut.n, cut.k


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_the_ranks_parts_make_up_every_matrix(tp: int) -> None:
    arch = arch_of()
    for name in weight_names(arch):
        if "norm" in name or name.endswith(".bias"):
            continue
        whole = Stored().matrix(name, *whole_shape(arch, name)).as_float32()
        parts = []
        for rank in range(tp):
            shares = RankSpans(arch, Mesh(1, 1, tp, tp_rank=rank))
            cut = shares.cut(name)
            source = ShardSource(Stored(), shares)
            parts.append(source.matrix(name, cut.rows.size, cut.columns.size).as_float32())
        axis = 1 if "o_proj" in name or "down_proj" in name else 0
        assert np.array_equal(np.concatenate(parts, axis=axis), whole), name


@pytest.mark.parametrize("tp", [2, 3])
def test_partial_products_and_biases_add_up(tp: int) -> None:
    arch = arch_of()
    name = "model.layers.0.mlp.down_proj."
    x = np.random.default_rng(1).standard_normal((4, arch.ffn))
    weight, bias = Stored().matrix(name + "weight", arch.hidden, arch.ffn), Stored().vector(name + "bias", arch.hidden)
    total = np.zeros((4, arch.hidden))
    for rank in range(tp):
        shares = RankSpans(arch, Mesh(1, 1, tp, tp_rank=rank))
        source, columns = ShardSource(Stored(), shares), shares.ffn
        part = source.matrix(name + "weight", arch.hidden, columns.size).as_float32()
        total += x[:, columns.start : columns.stop] @ part.T + source.vector(name + "bias", arch.hidden)
    assert np.allclose(total, x @ weight.as_float32().T + bias)


def test_a_rank_has_its_share_of_a_bias_and_all_of_a_norm() -> None:
    arch = arch_of()
    shares = RankSpans(arch, Mesh(1, 1, 2, tp_rank=1))
    source = ShardSource(Stored(), shares)
    name = "model.layers.1.self_attn.k_proj.bias"
    assert np.array_equal(source.vector(name, shares.kv.size), Stored().vector(name, 24)[shares.kv.start :])
    name = "model.layers.1.self_attn.q_norm.weight"
    assert np.array_equal(source.vector(name, 8), Stored().vector(name, 8))


def test_whole_heads_and_units_go_to_a_rank() -> None:
    shares = [RankSpans(arch_of(ffn=14336, vocab_size=128256), Mesh(1, 1, 2, tp_rank=rank)) for rank in range(2)]
    assert [(s.q_heads, s.kv_heads) for s in shares] == [(4, 2), (2, 1)]
    assert [s.ffn for s in shares] == [Span(0, 7168), Span(7168, 14336)]
    assert shares[0].vocab_sizes == [64128, 64128]
    uneven = [RankSpans(arch_of(), Mesh(1, 1, 3, tp_rank=rank)) for rank in range(3)]
    assert [s.ffn.size for s in uneven] == [32, 32, 16]
    assert [s.vocab.size for s in uneven] == [17, 17, 16]


def test_rows_of_blocks_are_cut_between_blocks() -> None:
    values = np.random.default_rng(0).standard_normal((5, 128), np.float32)
    for scheme in ("q8_0", "int8"):
        kind, raw = quantize_rows(scheme, values)
        matrix = RawMatrix(kind, raw, 5, 128)
        part = columns_of(matrix, Span(32, 96))
        assert np.array_equal(part.as_float32(), matrix.as_float32()[:, 32:96])
    with pytest.raises(ConfigError, match="blocks of 32"):
        columns_of(RawMatrix(*quantize_rows("q8_0", values), 5, 128), Span(16, 96))


@pytest.mark.parametrize("tp", [2, 3])
def test_noise_is_the_same_for_every_topology(tp: int) -> None:
    arch = arch_of()
    source = DummySource(arch, weight_names(arch), Path())
    alone = NoiseWeights(source, torch.bfloat16, CPU)
    names = ["model.layers.1.self_attn.o_proj.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight"]
    wholes = {name: alone.matrix(name, *whole_shape(arch, name)) for name in names}
    assert not torch.equal(wholes[names[0]], torch.zeros_like(wholes[names[0]]))
    for rank in range(tp):
        shares = RankSpans(arch, Mesh(1, 1, tp, tp_rank=rank))
        mine = own_weights(source, torch.bfloat16, CPU, shares)
        assert isinstance(mine, NoiseShards)
        for name in reversed(names):
            cut = shares.cut(name)
            part = wholes[name][cut.rows.start : cut.rows.stop, cut.columns.start : cut.columns.stop]
            assert torch.equal(mine.matrix(name, cut.rows.size, cut.columns.size), part)
        assert mine.vector("model.layers.0.self_attn.q_proj.bias", shares.q.size).shape == (shares.q.size,)


def test_stored_weights_reach_the_device_as_shares() -> None:
    arch = arch_of()
    shares = RankSpans(arch, Mesh(1, 1, 2, tp_rank=1))
    name = "model.layers.0.self_attn.o_proj.weight"
    found = own_weights(Stored(), torch.bfloat16, CPU, shares).matrix(name, 48, shares.q.size)
    whole = torch.from_numpy(Stored().matrix(name, 48, 48).as_float32()).bfloat16()
    assert torch.equal(found, whole[:, shares.q.start :])
