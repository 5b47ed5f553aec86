"""Mixtures of experts in the GPU's model body on the CPU, ops in plain torch: against the CPU's own body, spread and in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import Tensor

from tests.models.drive import Driver, load
from tests.models.test_cuda_linear import error
from tests.models.test_cuda_spread import OnCpu, plain_ops  # noqa: F401  (a fixture)
from tests.models.test_cuda_spread import logits_of as spread_logits
from tests.models.test_families_more import change_config, make, rewrite
from trireme.config import ModelConfig
from trireme.errors import ModelError
from trireme.machine.gpu_support import lacks_on_gpu
from trireme.model.files import files_of, find_model
from trireme.model.reader import read_arch
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda import reference as cuda_reference
from trireme.models.cuda.decoder import CudaModel
from trireme.models.cuda.host_adapter import HostModel
from trireme.models.cuda.layers import moe as layer
from trireme.models.cuda.layers import moe_ops as cuda_experts
from trireme.models.cuda.layers.moe_ops import TILE_ROWS, ExpertActivation, room_for_pairs, tile_rows
from trireme.models.cuda.weight_offload import OffloadedWeights, tensors_of
from trireme.models.cuda.weights.experts import mxfp4_values
from trireme.models.cuda.weights.shards import own_weights
from trireme.models.cuda.weights.sources import device_weights
from trireme.models.forward import SoloGroup
from trireme.models.load import load_model, open_checked, open_weights
from trireme.models.weights.tp_shards import RankSpans
from trireme.topology.mesh import Mesh

CPU = torch.device("cpu")
TEXT = [(7 * i * i + 3 * i) % 300 for i in range(40)]
EXPERT_OPS = ("route_experts", "sort_pairs", "expert_gates", "expert_outputs", "mix_experts")


@pytest.fixture(autouse=True)
def _expert_ops(monkeypatch: pytest.MonkeyPatch, plain_ops: None) -> None:  # noqa: F811
    torch.manual_seed(0)
    for name in EXPERT_OPS:
        monkeypatch.setattr(cuda_experts, name, getattr(cuda_reference, name + "_reference"))
    monkeypatch.setattr(cuda_ops, "skinny_max_rows", lambda: 32)


def body(path: Path) -> HostModel:
    files = find_model(path)
    arch = read_arch(files)
    assert lacks_on_gpu(arch) == []
    source = device_weights(open_weights(files, arch), torch.float32, CPU)
    with OnCpu(), torch.inference_mode():
        model = CudaModel(arch, source, torch.float32, max_len=64, progress=lambda *_: None)
    source.close()
    return HostModel(model, "cpu")


def logits_of(model: Any, steps: list[list[tuple[int, list[int]]]], rows: int = 1) -> list[Tensor]:
    """Of all tokens of each step."""
    with OnCpu():
        driver = Driver(model, rows, 64)
        if isinstance(model, HostModel):
            driver.kv = model.model.allocate_kv(driver.kv[0].k.shape[0], 4)  # type: ignore[assignment]
        found = [driver.step(step, all_logits=True) for step in steps]
    return [logits for logits in found if logits is not None]


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("gpt_oss", {}),
        ("gpt_oss", {"num_experts_per_tok": 1}),
        ("gpt_oss", {"num_local_experts": 7, "num_experts_per_tok": 7}),
        ("mixtral", {}),
        ("mixtral-windowed", {}),
        ("qwen3_moe", {}),
    ],
)
def test_a_model_is_that_of_the_cpu(name: str, changes: dict[str, int], tmp_path: Path) -> None:
    """A prompt at once, its first part and then single tokens, and both in one step; sinks, windows and YaRN among it."""
    path = make(tmp_path, name, **changes)
    expected = logits_of(load(path), [[(0, TEXT)]])[0]
    model = body(path)
    assert error(logits_of(model, [[(0, TEXT)]])[0], expected) < 1e-4
    cut = [[(0, TEXT[:23])], *([(0, [token])] for token in TEXT[23:])]
    assert error(torch.cat(logits_of(model, cut)), expected) < 1e-4
    mixed = [[(0, TEXT[:9])], [(0, TEXT[9:10]), (1, TEXT[:30])], [(1, TEXT[30:31]), (0, TEXT[10:17])]]
    together = torch.cat(logits_of(model, mixed, rows=2)[1:])
    alone = torch.cat((expected[9:10], expected[:30], expected[30:31], expected[10:17]))
    assert error(together, alone) < 1e-4


def test_long_steps_are_computed_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = body(make(tmp_path, "gpt_oss"))
    whole = logits_of(model, [[(0, TEXT)]])[0]
    monkeypatch.setattr(layer, "TOKENS", 7)
    assert error(logits_of(model, [[(0, TEXT)]])[0], whole) < 1e-6


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", ["gpt_oss", "mixtral", "qwen3_moe"])
def test_ranks_have_columns_of_every_expert(name: str, tp: int, pp: int, tmp_path: Path) -> None:
    """Sums of parts of rows, biases added once, sinks by head."""
    files = find_model(make(tmp_path, name))
    arch = read_arch(files)

    def own(shares: RankSpans) -> Any:
        return own_weights(open_weights(files, arch), torch.float32, CPU, shares)

    alone, spread = (torch.stack(spread_logits(arch, *parts, own)) for parts in ((1, 1), (tp, pp)))
    assert error(spread, alone) < 1e-4


def test_a_share_that_no_kernel_takes_is_refused(tmp_path: Path) -> None:
    files = find_model(make(tmp_path, "gpt_oss", intermediate_size=72))
    arch = read_arch(files)
    with pytest.raises(ModelError, match="experts of 72 columns is 36, no multiple of 8"):
        spread_logits(arch, 2, 1, lambda shares: own_weights(open_weights(files, arch), torch.float32, CPU, shares))


def test_weights_are_counted_and_put_away(tmp_path: Path) -> None:
    path = make(tmp_path, "gpt_oss")
    model = body(path).model
    stored = load_file(path / "model.safetensors")
    matrices = sum(tensor.nbytes for name, tensor in stored.items() if tensor.dim() > 1)
    assert model.weight_bytes == matrices
    shelf = OffloadedWeights(tensors_of(model))
    assert shelf.nbytes > matrices


@pytest.mark.parametrize(
    ("name", "is_packed"), [("gpt_oss", False), ("gpt_oss", True), ("mixtral", False), ("qwen3_moe", False)]
)
def test_noise_in_place_of_weights(name: str, is_packed: bool, tmp_path: Path) -> None:
    """Without the files of any, the same for every number of ranks; on the CPU refused."""
    path = make(tmp_path, name, intermediate_size=64)
    (path / "model.safetensors").unlink()
    change_config(path, quantization_config={"quant_method": "mxfp4"} if is_packed else None)
    files = files_of(ModelConfig(model=str(path), load_format="dummy"))
    arch = read_arch(files)

    def own(shares: RankSpans) -> Any:
        return own_weights(open_checked(files, arch, dummy=True), torch.float32, CPU, shares)

    alone, spread = (torch.stack(spread_logits(arch, tp, 1, own)) for tp in (1, 2))
    assert alone.isfinite().all()
    assert alone.std() > 0
    assert error(spread, alone) < 1e-4
    with pytest.raises(ModelError, match=f"weights of {name} on a GPU alone"):
        load_model(files, arch, Mesh(1, 1, 1), SoloGroup(), dummy=True)


def packed(path: Path) -> dict[str, Tensor]:
    """The weights of `path` with random MXFP4 experts."""
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        count, inputs, outputs = weights.pop(name).shape
        weights[name + "_blocks"] = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
        weights[name + "_scales"] = torch.randint(121, 125, (count, outputs, inputs // 32), dtype=torch.uint8)
    return weights


def test_experts_of_mxfp4_are_expanded(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = make(tmp_path, "gpt_oss", intermediate_size=64)
    weights = packed(path)
    rewrite(path, weights)
    change_config(path, quantization_config={"quant_method": "mxfp4"})
    found = logits_of(body(path), [[(0, TEXT)]])[0]
    for name in [name.removesuffix("_blocks") for name in weights if name.endswith("_blocks")]:
        both = weights.pop(name + "_blocks"), weights.pop(name + "_scales")
        weights[name] = convert_moe_packed_tensors(*both, dtype=torch.float32).contiguous()
        assert torch.equal(mxfp4_values(both[0][1], both[1][1]).T, weights[name][1])
    rewrite(path, weights)
    change_config(path, quantization_config=None)
    assert torch.equal(logits_of(body(path), [[(0, TEXT)]])[0], found)


def test_what_the_gpu_lacks_for_llama_4_is_named(tmp_path: Path) -> None:
    missing = lacks_on_gpu(read_arch(find_model(make(tmp_path, "llama4"))))
    assert "experts whose inputs are scaled" in missing
    assert "experts that all tokens share" in missing
    assert "attention in chunks" in missing


# ---------------------------------------------------------------- pairs by expert


@settings(deadline=None)
@given(st.data())
def test_every_pair_has_one_place_in_a_tile_of_its_expert(data: st.DataObject) -> None:
    """However they fall: there is room for all tiles, none is empty, and together they are the places in order."""
    experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, experts))
    tokens = data.draw(st.integers(1, 80))
    favourites = data.draw(st.lists(st.permutations(range(experts)), min_size=1, max_size=3))
    chosen = torch.tensor([favourites[token % len(favourites)][:top_k] for token in range(tokens)], dtype=torch.int32)
    order = room_for_pairs(chosen.numel(), experts, chosen)
    order.tiles.fill_(-1)
    cuda_reference.sort_pairs_reference(chosen, order, experts)
    assert order.pairs.sort().values.tolist() == list(range(chosen.numel()))
    count = int(order.tiles[0])
    assert count <= order.most_tiles
    place = 0
    for expert, first, size in order.tiles[1 : 1 + 3 * count].view(-1, 3).tolist():
        assert first == place
        assert 1 <= size <= order.rows
        assert chosen.flatten()[order.pairs[first : first + size].long()].eq(expert).all()
        place += size
    assert place == chosen.numel()


def test_tiles_grow_with_what_an_expert_has() -> None:
    assert [tile_rows(pairs, 32) for pairs in (4, 512, 513, 2048, 2049, 1 << 20)] == [16, 16, 64, 64, 128, 128]
    assert TILE_ROWS == (16, 64, 128)


def test_the_choice_is_by_size_then_number() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 2.0], [0.0, float("nan"), 5.0, float("inf")]])
    chosen, scores = torch.empty(2, 2, dtype=torch.int32), torch.empty(2, 2)
    cuda_reference.route_experts_reference(logits, chosen, scores)
    assert chosen.tolist() == [[1, 2], [1, 3]]
    assert scores[0].tolist() == [0.5, 0.5]
    assert scores[1].isnan().all()


def test_the_gate_without_a_limit_is_swiglu() -> None:
    x, weight = torch.randn(3, 8), torch.randn(2, 16, 8)
    chosen = torch.tensor([[0], [1], [1]], dtype=torch.int32)
    order = room_for_pairs(3, 2, chosen)
    cuda_reference.sort_pairs_reference(chosen, order, 2)
    out = cuda_reference.expert_gates_reference(x, weight, torch.empty(3, 8), order, 1, ExpertActivation())
    silu, pairs = torch.nn.functional.silu, zip(weight[[0, 1, 1]], x, strict=True)
    expected = torch.stack([silu(w[:8] @ row) * (w[8:] @ row) for w, row in pairs])
    torch.testing.assert_close(out, expected)
