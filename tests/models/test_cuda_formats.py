"""The GPU's model body on the CPU, ops in plain torch: families and formats of weights against the CPU's own body, in float32."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.models.drive import Driver, load
from tests.models.test_cuda_linear import TWINS, WIDE, dense_of, error
from tests.models.test_cuda_spread import OPS, OnCpu, plain_ops  # noqa: F401  (a fixture)
from tests.models.test_cuda_spread import logits_of as spread_logits
from tests.models.test_families import MODELS, length_dependent, make, rearrange
from tests.models.test_families_more import GPT
from tests.models.test_families_more import make as make_gpt
from tests.models.test_int8_model import compressed
from tests.models.tiny import make_tiny
from tests.models.tiny_gguf import gguf_from_directory
from trireme.machine.gpu_support import lacks_on_gpu
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda import reference as cuda_reference
from trireme.models.cuda.decoder import CudaModel
from trireme.models.cuda.host_adapter import HostModel
from trireme.models.cuda.weight_offload import OffloadedWeights, tensors_of
from trireme.models.cuda.weights.shards import own_weights
from trireme.models.cuda.weights.sources import device_weights
from trireme.models.load import as_decoder, open_weights
from trireme.models.weights.tp_shards import RankSpans

LAYERED = ("cohere", "cohere-plus", "olmo2", "stablelm", "stablelm-2")  # layer norms, or norms of whole q and k
CPU = torch.device("cpu")
TOKENS = [[(7 * row + 11 * i * i) % 250 for i in range(24)] for row in range(20)]


@pytest.fixture(autouse=True)
def _more_ops(monkeypatch: pytest.MonkeyPatch, plain_ops: None) -> None:  # noqa: F811
    for name in TWINS:
        monkeypatch.setattr(cuda_ops, name, getattr(cuda_reference, name + "_reference"))
    monkeypatch.setattr(cuda_ops, "skinny_max_rows", lambda: 32)


def body(path: Path, *, scheme: str | None = None, kv_dtype: torch.dtype | None = None, max_len: int = 64) -> Any:
    files = find_model(path)
    arch = read_arch(files)
    assert lacks_on_gpu(arch, max_len) == []
    source = device_weights(as_decoder(open_weights(files, arch), arch), torch.float32, CPU, scheme=scheme)
    with OnCpu(), torch.inference_mode():
        model = CudaModel(arch, source, torch.float32, max_len=max_len, progress=lambda *_: None, kv_dtype=kv_dtype)
    source.close()
    return model


def decoded(model: CudaModel, rows: int) -> Tensor:
    """Logits [rows, tokens, V] of TOKENS, one token of every row at a time."""
    host: Any = HostModel(model, "cpu")
    with OnCpu():
        driver = Driver(host, rows, 64, block_size=4)
        driver.kv = model.allocate_kv(driver.kv[0].k.shape[0], 4)  # type: ignore[assignment]
        steps = [driver.step([(row, [TOKENS[row][i]]) for row in range(rows)]) for i in range(len(TOKENS[0]))]
    return torch.stack([step for step in steps if step is not None], 1)


def prefilled(model: CudaModel, rows: int) -> Tensor:
    """The same, each row's first half and then the rest as a prompt."""
    host: Any = HostModel(model, "cpu")
    with OnCpu():
        driver = Driver(host, rows, 64, block_size=4)
        driver.kv = model.allocate_kv(driver.kv[0].k.shape[0], 4)  # type: ignore[assignment]
        halves = [[(row, TOKENS[row][half]) for row in range(rows)] for half in (slice(11), slice(11, None))]
        steps = [driver.step(half, all_logits=True) for half in halves]
    parts = [step.view(rows, -1, step.shape[-1]) for step in steps if step is not None]
    return torch.cat(parts, 1)


def expected_of(path: Path, rows: int) -> Tensor:
    """By the CPU's body, a row at a time."""
    model, found = load(path), []
    for row in range(rows):
        logits = Driver(model, 1, 64).step([(0, TOKENS[row])], all_logits=True)
        assert logits is not None
        found.append(logits)
    return torch.stack(found)


@pytest.mark.parametrize(
    "name", ["gemma", "gemma2", "gemma2-capped", "gemma3", "granite", "phi3", "smollm3", *LAYERED, *GPT]
)
def test_families_are_those_of_the_cpu(name: str, tmp_path: Path) -> None:
    """Windows, two rotary tables and none, norms before, after and side by side, offsets, scales and biases, no gate; more tokens
    than a window has."""
    path = make(tmp_path, name) if name in MODELS else make_gpt(tmp_path, name)
    model, expected = body(path), expected_of(path, 2)
    assert error(decoded(model, 2), expected) < 1e-3
    assert error(prefilled(model, 2), expected) < 1e-3


def test_a_base_that_grows_with_the_length_is_the_trained_one(tmp_path: Path) -> None:
    path = length_dependent(tmp_path, "dynamic")
    trained = read_arch(find_model(path)).rope.original_max_position
    assert trained == 48
    assert lacks_on_gpu(read_arch(find_model(path))) == ["a rotary base that grows with the length"]
    assert error(decoded(body(path, max_len=trained), 2), expected_of(path, 2)) < 1e-3


@pytest.mark.parametrize(
    ("max_len", "num_prompt", "cuts"),
    [
        (48, 20, []),
        (48, 48, [16]),
        (96, 20, []),
        (96, 48, [47]),
        (96, 49, []),
        (96, 49, [1, 48]),
        (96, 64, [47, 48, 49]),
        (96, 44, [*range(44, 56)]),
        (96, 1, [*range(1, 52)]),
    ],
)
def test_longrope_is_that_of_the_cpu(max_len: int, num_prompt: int, cuts: list[int], tmp_path: Path) -> None:
    """Prompts below, at and beyond the trained 48 tokens, cut anywhere, one token alone among the parts, and generated tokens that
    pass it."""
    length = max([num_prompt, *(cut + 1 for cut in cuts)])
    path = length_dependent(tmp_path, "longrope")
    text = [(11 * i * i + 3) % 250 for i in range(length)]
    steps = [text[start:stop] for start, stop in pairwise([0, *cuts, length])]
    gpu, cpu = body(path, max_len=max_len), load(path, max_len=max_len)
    with OnCpu():
        drivers = [
            Driver(model, 1, max_len, block_size=4, num_prompt=num_prompt) for model in (HostModel(gpu, "cpu"), cpu)
        ]
        drivers[0].kv = gpu.allocate_kv(drivers[0].kv[0].k.shape[0], 4)
        for step in steps:
            found, expected = (driver.step([(0, step)], all_logits=True) for driver in drivers)
            assert found is not None
            assert expected is not None
            assert error(found, expected) < 1e-3


@pytest.mark.parametrize("scheme", ["fp8", "int8"])
@pytest.mark.parametrize("name", ["gpt2", "gpt_neox", "falcon-7b"])
def test_layer_norms_and_networks_without_a_gate_round_their_outputs(name: str, scheme: str, tmp_path: Path) -> None:
    path = make_gpt(tmp_path, name, hidden_size=128)
    found, expected = decoded(body(path, scheme=scheme), 12), expected_of(path, 12)
    assert 1e-3 < error(found, expected) < (0.25 if scheme == "fp8" else 0.08)


def test_a_head_of_unit_rows(tmp_path: Path) -> None:
    """Rows of different lengths, so that the head as it is stored would say something else."""
    path = make_tiny(tmp_path, **WIDE, num_hidden_layers=1, vocab_size=125696, tokenizer=False)
    weights = load_file(path / "model.safetensors")
    weights["lm_head.weight"] *= torch.linspace(0.5, 2, 125696)[:, None]
    at = "model.layers.0.self_attn."
    weights[at + "W_pack.weight"] = torch.cat([weights.pop(f"{at}{side}_proj.weight") for side in "qkv"])
    rearrange(path, {"model_type": "baichuan"}, weights)
    assert read_arch(find_model(path)).unit_head
    assert error(decoded(body(path), 1), expected_of(path, 1)) < 1e-3


def rounded(path: Path, scheme: str, directory: Path) -> Path:
    """The checkpoint with the values that `scheme` rounds its layers to."""
    from trireme.models.cuda.weights.sources import ROUNDED

    directory.mkdir()
    weights = load_file(path / "model.safetensors")
    for name in weights:
        if "_proj.weight" in name:
            weights[name] = dense_of(ROUNDED[scheme](weights[name])).float().contiguous()
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text((path / "config.json").read_text())
    return directory


@pytest.mark.parametrize("scheme", ["fp8", "q4_k"])
def test_rounded_weights_in_a_whole_model(scheme: str, tmp_path: Path) -> None:
    path = make_tiny(tmp_path / "a", **{**WIDE, "intermediate_size": 512})
    same = rounded(path, scheme, tmp_path / "b")
    model = body(path, scheme=scheme)
    assert error(decoded(model, 2), expected_of(same, 2)) < 1e-3
    many = error(decoded(model, 12), expected_of(same, 12))
    assert many < (0.15 if scheme == "fp8" else 1e-3)
    assert (many > 0.002) is (scheme == "fp8"), "the inputs of many rows are rounded to float8, and only there"


@pytest.mark.parametrize("strategy", ["channel", "tensor"])
def test_an_int8_checkpoint_is_what_it_is_on_a_cpu(strategy: str, tmp_path: Path) -> None:
    """Both round inputs by the same formula, so only values on the border of two steps may part them."""
    path = compressed(make_tiny(tmp_path, **WIDE), strategy)
    expected = expected_of(path, 12)
    model = body(path)
    few, many = decoded(model, 2), decoded(model, 12)
    assert error(few, expected[:2]) < 0.01
    assert error(many, expected) < 0.01
    prompts = decoded(body(path), 20)[:12]  # more rows than torch's product needs
    assert error(prompts, expected) < 0.01


def test_ranks_round_their_own_part_of_the_inputs(tmp_path: Path) -> None:
    """Which makes finer steps of them, so the logits are near those of one rank, not the same; rows of weights keep their scale."""
    path = compressed(make_tiny(tmp_path, **WIDE))
    files = find_model(path)
    arch = read_arch(files)

    def own(shares: RankSpans) -> Any:
        return own_weights(open_weights(files, arch), torch.float32, CPU, shares)

    alone, spread = (torch.stack(spread_logits(arch, tp, 1, own)) for tp in (1, 2))
    assert 1e-4 < error(spread, alone) < 0.05


def test_weights_rounded_to_int8_are_those_of_such_a_checkpoint(tmp_path: Path) -> None:
    dense, stored = make_tiny(tmp_path / "a", **WIDE), compressed(make_tiny(tmp_path / "b", **WIDE))
    models = body(dense, scheme="int8"), body(stored)
    mine, theirs = ([x for x in tensors_of(model) if x.dtype == torch.int8] for model in models)
    assert len(mine) == 2 * 4 * models[0].num_kv_layers  # each weight, and its transposed view
    apart = torch.cat([(a.int() - b.int()).abs().flatten() for a, b in zip(mine, theirs, strict=True)])
    assert apart.max() <= 1
    assert apart.float().mean() < 1e-4, "of values on the border of two steps"
    assert error(*(decoded(model, 3) for model in models)) < 0.01


def test_a_gguf_file_of_mixed_types(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, **{**WIDE, "intermediate_size": 512})
    kinds = {"ffn_down.weight": "Q8_0", "attn_v.weight": "Q5_0", "token_embd.weight": "F16", "output.weight": "F16"}
    file = gguf_from_directory(path, tmp_path / "m.gguf", "Q4_K", kinds=kinds)
    assert error(decoded(body(file), 2), expected_of(file, 2)) < 0.03, "the CPU rounds inputs of blocks to 8 bits"


def test_a_cache_of_float8(tmp_path: Path) -> None:
    path = make_tiny(tmp_path, **WIDE)
    model = body(path, kv_dtype=torch.float8_e4m3fn)
    found = error(decoded(model, 2), expected_of(path, 2))
    assert 0.001 < found < 0.1


def test_a_model_that_was_put_away_says_the_same(tmp_path: Path) -> None:
    model = body(make_tiny(tmp_path, **WIDE), scheme="fp8")
    before = decoded(model, 2)
    tensors = tensors_of(model)
    shelf = OffloadedWeights(tensors)
    assert shelf.nbytes >= model.weight_bytes
    shelf.offload()
    left = [tensor for tensor in tensors if tensor.untyped_storage().nbytes()]
    assert sum(tensor.nbytes for tensor in left) < 0.1 * shelf.nbytes, "vectors that lie in numpy's memory, on the CPU"
    shelf.restore()
    assert torch.equal(decoded(model, 2), before)
