"""Mixtures of experts on a GPU: each kernel against its torch reference over dtypes and odd shapes, a layer in a CUDA graph, whole
models against transformers, and the engine against the CPU."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from tests.gpu.test_cuda_model import MARGIN, GpuDriver, error, load_on_gpu, logits_of
from tests.gpu.test_cuda_ops import ALL, ERROR, HALF, poisoned, random
from tests.gpu.test_cuda_prompts import Case
from tests.gpu.test_cuda_quantized import PROMPTS, told
from tests.models.tiny import write_byte_tokenizer
from trireme import LLM
from trireme.models.cuda import reference
from trireme.models.cuda.attention.prefill import PromptAttention
from trireme.models.cuda.attention.prefill_plan import PIECES
from trireme.models.cuda.attention.registry import Need, choose_on_gpu
from trireme.models.cuda.layers import moe as layer
from trireme.models.cuda.layers import moe_ops as ops
from trireme.models.cuda.layers.linear import CudaLinear
from trireme.models.cuda.layers.moe import CudaExperts, ExpertWeights
from trireme.models.cuda.layers.moe_ops import TILE_ROWS, ExpertActivation, Sorted, room_for_pairs
from trireme.models.cuda.weights.experts import mxfp4_values

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
GATES = [ExpertActivation(), ExpertActivation(1.5, 1.702)]


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


# ---------------------------------------------------------------- the choice, and pairs by expert


@pytest.mark.parametrize("dtype", ALL)
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 1, 1), (3, 4, 2), (9, 32, 4), (700, 128, 4), (33, 7, 7), (65, 256, 32), (8, 100, 8)],
)
def test_the_choice(dtype: torch.dtype, tokens: int, experts: int, top_k: int) -> None:
    """Equal logits, of which 16 bits have many, are chosen by number; infinities and NaN are where torch sorts them."""
    logits = random(tokens, experts + 3, dtype=dtype)[:, :experts]
    if tokens > 8 and experts > 6:
        logits[1], logits[2, 5], logits[3, 5], logits[4, 1:] = 0, float("nan"), -float("inf"), -float("inf")
        logits[5, 2], logits[6], logits[7, :2] = float("inf"), float("nan"), torch.tensor([-0.0, 0.0])
    chosen, scores = (
        torch.full((tokens, top_k), -1, device="cuda", dtype=torch.int32),
        poisoned(tokens, top_k, dtype=torch.float32),
    )
    expected, shares = chosen.clone(), scores.clone()
    ops.route_experts(logits, chosen, scores)
    reference.route_experts_reference(logits, expected, shares)
    assert torch.equal(chosen, expected)
    torch.testing.assert_close(scores, shares, equal_nan=True, rtol=1e-5, atol=1e-6)


def random_choice(tokens: int, experts: int, top_k: int, *, skewed: bool) -> Tensor:
    """Different experts for each token; skewed: nearly all want the same ones, and some experts are left without any."""
    wanted = torch.rand(tokens, experts, device="cuda")
    if skewed:
        wanted += torch.linspace(3, 0, experts, device="cuda") * (torch.rand(tokens, 1, device="cuda") < 0.95)
    return wanted.topk(top_k, -1).indices.int()


def sorted_by_kernel(chosen: Tensor, experts: int, rows: int = 0) -> Sorted:
    order = room_for_pairs(chosen.numel(), experts, chosen)
    if rows:
        most = (chosen.numel() + min(experts, chosen.numel()) * (rows - 1)) // rows
        order = Sorted(order.pairs, chosen.new_empty(1 + 3 * most), rows)
    order.pairs.fill_(-1)
    order.tiles.fill_(-1)
    ops.sort_pairs(chosen, order, experts)
    return order


@pytest.mark.parametrize("skewed", [False, True])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"),
    [(1, 1, 1), (1, 32, 4), (5, 4, 2), (64, 128, 4), (300, 7, 7), (4096, 32, 4), (999, 256, 8)],
)
def test_pairs_by_expert(tokens: int, experts: int, top_k: int, skewed: bool) -> None:
    chosen = random_choice(tokens, experts, top_k, skewed=skewed)
    for rows in (0, *TILE_ROWS):
        order = sorted_by_kernel(chosen, experts, rows)
        expected = Sorted(torch.empty_like(order.pairs), torch.full_like(order.tiles, -1), order.rows)
        reference.sort_pairs_reference(chosen, expected, experts)
        assert torch.equal(order.tiles, expected.tiles)
        assert torch.equal(order.pairs.sort().values, torch.arange(chosen.numel(), device="cuda").int())
        assert torch.equal(chosen.flatten()[order.pairs.long()], chosen.flatten()[expected.pairs.long()])


# ---------------------------------------------------------------- products


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("gate", GATES, ids=["swiglu", "clamped"])
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "hidden", "ffn"),
    [
        (1, 1, 1, 8, 8),
        (1, 32, 4, 2880, 2880),
        (3, 4, 2, 64, 96),
        (17, 5, 3, 72, 136),
        (40, 32, 4, 576, 200),
        (300, 4, 2, 200, 72),
        (700, 8, 2, 320, 264),
        (1500, 6, 4, 136, 128),
    ],
    ids=str,
)
def test_products(
    dtype: torch.dtype, gate: ExpertActivation, tokens: int, experts: int, top_k: int, hidden: int, ffn: int
) -> None:
    """Widths that are no whole tile or piece, experts without tokens, and every size of tile, which changes no bit."""
    x = random(tokens, hidden + 16, dtype=dtype)[:, 8 : 8 + hidden]
    gate_up, down = random(experts, 2 * ffn, hidden, dtype=dtype), random(experts, hidden, ffn, dtype=dtype)
    gate_up, down = gate_up * hidden**-0.5, down * ffn**-0.5
    biases = random(experts, 2 * ffn, dtype=dtype), random(experts, hidden, dtype=dtype)
    for skewed, has_bias in itertools.product((False, True), repeat=2):
        chosen = random_choice(tokens, experts, top_k, skewed=skewed)
        wide_bias, bias = biases if has_bias else (None, None)
        found = []
        for rows in TILE_ROWS:
            order = sorted_by_kernel(chosen, experts, rows)
            wide = poisoned(tokens * top_k, ffn, dtype=dtype)
            ops.expert_gates(x, gate_up, wide, order, top_k, gate, wide_bias)
            expected = torch.empty(tokens * top_k, ffn, device="cuda", dtype=torch.float64)
            reference.expert_gates_reference(x, gate_up, expected, order, top_k, gate, wide_bias)
            assert error(wide, expected) < ERROR[dtype], rows
            results = poisoned(tokens * top_k, hidden, dtype=dtype)
            ops.expert_outputs(wide, down, results, order, bias)
            expected = torch.empty(tokens * top_k, hidden, device="cuda", dtype=torch.float64)
            reference.expert_outputs_reference(wide, down, expected, order, bias)
            assert error(results, expected) < ERROR[dtype], rows
            found.append(results)
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize(("tokens", "top_k", "hidden"), [(1, 1, 8), (9, 4, 2880), (66000, 2, 16), (300, 8, 136)])
def test_weighted_sums(dtype: torch.dtype, tokens: int, top_k: int, hidden: int) -> None:
    results, scores = random(tokens, top_k, hidden, dtype=dtype), torch.rand(tokens, top_k, device="cuda")
    out = poisoned(tokens, hidden + 8, dtype=dtype)
    ops.mix_experts(results, scores, out[:, :hidden])
    expected = torch.empty(tokens, hidden, device="cuda", dtype=torch.float64)
    assert error(out[:, :hidden], reference.mix_experts_reference(results, scores, expected)) < ERROR[dtype]
    assert out[:, hidden:].isnan().all()


def test_what_no_kernel_takes_is_refused() -> None:
    x = random(4, 64, dtype=torch.bfloat16)
    chosen = torch.zeros(4, 1, device="cuda", dtype=torch.int32)
    order = sorted_by_kernel(chosen, 2)
    weight, out = random(2, 32, 64, dtype=torch.bfloat16), poisoned(4, 32, dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="8 divides; got 60 inputs"):
        ops.expert_outputs(x[:, :60], weight[:, :, :60].contiguous(), out, order)
    with pytest.raises(ValueError, match="16, 64 or 128 rows; got 32"):
        ops.expert_outputs(x, weight, out, order._replace(rows=32))
    with pytest.raises(ValueError, match="float16 or bfloat16"):
        ops.expert_outputs(x.float(), weight.float(), out.float(), order)
    with pytest.raises(ValueError, match="up to 256 experts; got 257"):
        ops.route_experts(random(4, 257), chosen, random(4, 1))
    with pytest.raises(ValueError, match="up to 32 of a token's experts; got 33 of 64"):
        ops.route_experts(random(4, 64), chosen.new_zeros(4, 33), random(4, 33))
    assert out.isnan().all()


# ---------------------------------------------------------------- a layer


def random_layer(
    dtype: torch.dtype, gate: ExpertActivation, experts: int = 32, hidden: int = 320, ffn: int = 200
) -> CudaExperts:
    weights = ExpertWeights(
        random(experts, 2 * ffn, hidden, dtype=dtype) * hidden**-0.5,
        random(experts, hidden, ffn, dtype=dtype) * ffn**-0.5,
        random(experts, 2 * ffn, dtype=dtype),
        random(experts, hidden, dtype=dtype),
    )
    router = CudaLinear(random(experts, hidden, dtype=dtype) * hidden**-0.5, random(experts, dtype=dtype))
    return CudaExperts(router, weights, 4, gate)


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("tokens", [1, 7, 64, 200])
def test_a_captured_layer_is_an_eager_one(dtype: torch.dtype, tokens: int) -> None:
    """Replays over inputs that choose other experts than those of the capture."""
    experts = random_layer(dtype, GATES[1])
    x, out = random(tokens, 320, dtype=dtype), poisoned(tokens, 320, dtype=dtype)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        experts(x, out)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        experts(x, out)
    for _ in range(5):
        x.copy_(random(tokens, 320, dtype=dtype))
        out.fill_(float("nan"))
        graph.replay()
        assert torch.equal(out, experts(x, torch.empty_like(out)))
        assert out.isfinite().all()


@pytest.mark.parametrize("dtype", HALF)
def test_long_inputs_in_parts_and_in_place(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    experts, x = random_layer(dtype, GATES[0]), random(500, 320, dtype=dtype)
    whole = experts(x, poisoned(500, 320, dtype=dtype))
    monkeypatch.setattr(layer, "TOKENS", 250)
    assert median_error(experts(x, x), whole) < 1e-6, "another product of the router may choose anew for a token or two"


def test_a_token_that_is_not_finite_spoils_no_other() -> None:
    experts, x = random_layer(torch.bfloat16, GATES[1]), random(40, 320, dtype=torch.bfloat16)
    clean = experts(x, torch.empty_like(x))
    x[7, 100] = float("nan")
    found = experts(x, torch.empty_like(x))
    assert found[7].isnan().all()
    found[7] = clean[7]
    assert torch.equal(found, clean)


def test_mxfp4_on_the_device() -> None:
    blocks = torch.randint(0, 256, (24, 3, 16), dtype=torch.uint8)
    scales = torch.randint(100, 140, (24, 3), dtype=torch.uint8)
    assert torch.equal(mxfp4_values(blocks.cuda(), scales.cuda()).cpu(), mxfp4_values(blocks, scales))


# ---------------------------------------------------------------- attention with sinks


@pytest.mark.parametrize("window", [0, 50])
def test_prompts_with_sinks(window: int) -> None:
    case, sinks = Case((8, 2), 64, torch.bfloat16), 3 * torch.randn(8, device="cuda")
    chosen = choose_on_gpu(Need(torch.bfloat16, 64, window, sinks=True), 8, 2)
    assert chosen.fresh is None
    assert chosen.whole is None

    def with_sinks(attention: Any) -> Any:
        return lambda *args: attention(*args, sinks=sinks)

    found = case.run(with_sinks(chosen.attention()), chosen.rules, window)
    plain = PromptAttention(PIECES, reference.piece_attention_reference)
    expected = case.run(with_sinks(plain), PIECES, window)
    assert error(found, expected) < 6e-3
    assert error(case.run(plain, PIECES, window), expected) > 0.1


# ---------------------------------------------------------------- whole models, and the engine


SHAPE: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 256,
    "intermediate_size": 192,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 150000.0,
    "factor": 8.0,
    "original_max_position_embeddings": 128,
    "truncate": False,
}
FAMILIES: dict[str, dict[str, Any]] = {
    "gpt_oss": {"sliding_window": 32, "rope_parameters": YARN},
    "mixtral": {},
    "qwen3_moe": {"num_experts": 8, "moe_intermediate_size": 112, "num_experts_per_tok": 3, "norm_topk_prob": True},
}


def write_model(directory: Path, family: str) -> tuple[Any, Any]:
    """A random model on disk, and transformers' own of it on the GPU, in bfloat16 and with the same values in float32."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **{**SHAPE, **FAMILIES[family]})
    twin = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in twin.named_parameters():
            noise = torch.randn_like(parameter)
            if name.endswith("sinks"):
                parameter.copy_(2 * noise)
            elif name.endswith("bias"):
                parameter.copy_(0.3 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(1 + 0.1 * noise)
            elif "embed_tokens" in name or "lm_head" in name:
                parameter.copy_(noise)
            else:
                inputs = parameter.shape[1 if family == "gpt_oss" else -1]  # (whose experts are inputs by outputs)
                parameter.copy_(noise * 1.6 * inputs**-0.5)
    twin.save_pretrained(directory)
    write_byte_tokenizer(directory, size=512)
    twin = twin.cuda().eval()
    return twin, copy.deepcopy(twin).float()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_logits_are_those_of_transformers(family: str, tmp_path: Path) -> None:
    """Token by token, as near to float32 as transformers' own bfloat16 is: where 16 bits choose another expert than float32 does,
    a token is far off, in theirs as in ours, so medians are compared."""
    theirs, twin = write_model(tmp_path, family)
    model = load_on_gpu(tmp_path)
    prompts = [torch.randint(0, 512, (size,)).tolist() for size in (*range(2, 32), 130, 300, 77)]
    full, half = (torch.cat([logits[:-1] for logits in logits_of(each, prompts)]) for each in (twin, theirs))
    driver = GpuDriver(model, len(prompts), 400)
    found = driver.step([(row, prompt[:-1]) for row, prompt in enumerate(prompts)], all_logits=True)
    last = driver.step([(row, prompt[-1:]) for row, prompt in enumerate(prompts)])
    assert found is not None
    assert last is not None
    assert median_error(found, full) < MARGIN * median_error(half, full)
    ends, half_ends = (torch.stack([logits[-1] for logits in logits_of(each, prompts)]) for each in (twin, theirs))
    assert median_error(last, ends) < 1.5 * MARGIN * median_error(half_ends, ends), "of 33 tokens only"


def median_error(found: Tensor, expected: Tensor) -> float:
    a, b = found.double().cpu(), expected.double().cpu()
    return float(((a - b).norm(dim=-1) / b.norm(dim=-1)).median())


class Written(NamedTuple):
    """A model on disk, and transformers' own of it in bfloat16 and in float32."""

    path: Path
    theirs: Any
    exact: Any


@pytest.fixture(scope="module", params=list(FAMILIES))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Written:
    path = tmp_path_factory.mktemp(request.param)
    return Written(path, *write_model(path, request.param))


def check_greedy_tokens(model: Written, device: str = "cuda", **settings: Any) -> None:
    """The engine's tokens for all prompts at once are as good as those of transformers' bfloat16."""
    with LLM(model.path, device=device, max_len=512, max_num_seqs=8, kv_memory="256MiB", **settings) as llm:
        check_quality(model, told(llm, PROMPTS), str(settings))


def check_quality(model: Written, texts: list[list[int]], what: str) -> None:
    """Greedy tokens are the best ones after what came before, by transformers in float32, as often as those of transformers' own
    bfloat16 would be: where 16 bits choose another expert, quite another token may be the best."""
    off = their_off = 0
    for prompt, ids in zip(PROMPTS, texts, strict=True):
        best, half = (
            logits_of(each, [[*prompt, *ids]])[0][len(prompt) - 1 : -1].argmax(-1).tolist()
            for each in (model.exact, model.theirs)
        )
        assert len(best) == len(ids)
        off += sum(a != b for a, b in zip(ids, best, strict=True))
        their_off += sum(a != b for a, b in zip(half, best, strict=True))
    print(f"{model.path.name} {what}: not the best {off}, of transformers' bfloat16 {their_off}")
    assert off <= 1.5 * their_off + 6


def test_greedy_tokens_are_as_good_as_those_of_transformers(model: Written) -> None:
    """Through the engine, whose decode steps are graphs."""
    check_greedy_tokens(model)


def test_two_ranks(model: Written) -> None:
    check_greedy_tokens(model, tp=2, share_gpus=torch.cuda.device_count() < 2)


@pytest.mark.parametrize("sizes", ["1,8", "none"])
def test_one_sequence_at_a_time_in_captured_and_eager_steps(model: Written, sizes: str) -> None:
    """A padded graph has slots for nobody, whose experts change no token of the others; neither does a step without a graph."""
    settings = {"device": "cuda", "max_len": 512, "max_num_seqs": 8, "kv_memory": "256MiB"}
    with LLM(model.path, graph_sizes=sizes, **settings) as llm:  # type: ignore[arg-type]
        check_quality(model, [told(llm, [prompt])[0] for prompt in PROMPTS], f"graph sizes {sizes}, one at a time")


def test_noise_in_place_of_weights(model: Written) -> None:
    """More rows than graphs at the start have, and steps with long prompts."""
    settings = {"device": "cuda", "load_format": "dummy", "kv_memory": "128MiB", "max_len": 512}
    with LLM(model.path, max_num_seqs=64, **settings) as llm:  # type: ignore[arg-type]
        prompts = [[(7 * i + 3 * j) % 250 for j in range(4 + 7 * i)] for i in range(64)]
        assert [len(ids) for ids in told(llm, prompts)] == [24] * 64
