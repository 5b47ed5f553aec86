"""The packaged Gemma 3 270M (Q4_K_M) gives the greedy tokens of Hugging Face transformers on the dequantized weights.

Our own greedy text (8 prompts x 48 tokens, one prompt longer than the sliding window) is given to the reference in one pass
per prompt; at each place our token must be the reference's first choice. As in test_smollm2.py the only arithmetic that
differs on purpose is that activations are rounded to int8; how much that alone moves a margin is measured on the reference.
"""

from __future__ import annotations

import functools
import gc
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.models.drive import Driver, load
from tests.models.test_parity_files import int8_activations
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.serving.text.tokens import load_tokenizer

transformers = pytest.importorskip("transformers")

NUM_NEW = 48
WINDOW = 512
ROUNDED = [0, 2, 5]  # prompts on which rounding is measured
NEAR_TIE = 4.0  # a token may differ where the margin is below so many rms errors of int8 rounding
WINDS = ["north", "east", "south-west", "south", "north-east", "west"]
LOG = "".join(f"Day {day}: wind from the {WINDS[day % 6]}, {day * 7 % 23 + 2} miles made.\n" for day in range(1, 38))
PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "<start_of_turn>user\nName the planets of the solar system.<end_of_turn>\n<start_of_turn>model\n",
    "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n",
    "Es war einmal ein kleines M\u00e4dchen, das",
    "1, 2, 3, 4, 5, 6,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The log of the ship Patience.\n" + LOG + "Day 38:",
]


@pytest.fixture(scope="module")
def path() -> Path:
    try:
        return find_model("gemma3-270m").path
    except ModelError as error:
        pytest.skip(str(error))


def expand(tensor: gguf.ReaderTensor) -> np.ndarray:
    """Float32 values [rows, columns] by the gguf package, many blocks at a time: it takes 16 rows at once of itself."""
    data = np.asarray(tensor.data).view(np.ndarray)
    if tensor.tensor_type == gguf.GGMLQuantizationType.F32:
        return data
    _, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
    blocks = data.reshape(-1, block_bytes)
    expand_blocks = getattr(gguf.quants, tensor.tensor_type.name).dequantize_blocks
    parts = [expand_blocks(blocks[at : at + 8192]) for at in range(0, len(blocks), 8192)]
    return np.concatenate(parts).astype(np.float32, copy=False).reshape(data.shape[0], -1)


def reference_model(path: Path) -> Any:
    """Gemma 3 of transformers with the weights expanded by the gguf package; shares no code with our loader."""
    config = transformers.Gemma3TextConfig(
        hidden_size=640,
        intermediate_size=2048,
        num_hidden_layers=18,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        vocab_size=262144,
        sliding_window=WINDOW,
        layer_types=["full_attention" if layer % 6 == 5 else "sliding_attention" for layer in range(18)],
    )
    with torch.device("meta"):
        model = transformers.Gemma3ForCausalLM(config)
    names = gguf.TensorNameMap(gguf.MODEL_ARCH.GEMMA3, 18)
    of_gguf = {names.get_name(name, (".weight",)): name for name in model.state_dict()}
    weights = {}
    for tensor in gguf.GGUFReader(path).tensors:
        values = expand(tensor)
        # transformers adds the one to norm weights that GGUF already holds
        weights[of_gguf[tensor.name]] = torch.tensor(values - 1.0 if "norm" in tensor.name else values)
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    model.model.embed_tokens.embed_scale = torch.tensor(640**0.5)
    for module in model.modules():
        if isinstance(module, torch.nn.Linear):
            module.forward = functools.partial(multiply, module.weight.detach().numpy().T)
    return model.eval()


def multiply(weight: np.ndarray, x: torch.Tensor) -> torch.Tensor:
    """x times a matrix by numpy, whose library is several times faster than torch's on some makers' processors."""
    return torch.from_numpy(x.flatten(0, -2).numpy() @ weight).unflatten(0, x.shape[:-1])


def greedy(prompts: list[list[int]]) -> tuple[list[list[int]], torch.Tensor]:
    """Our tokens [8][48], all rows decoded as one batch, and the logits they were chosen from [8, 48, vocab]."""
    driver = Driver(load("gemma3-270m", max_len=1280), len(prompts), max(map(len, prompts)) + NUM_NEW, block_size=16)
    step = driver.step(list(enumerate(prompts)))
    logits = torch.empty(len(prompts), NUM_NEW, 262144)
    tokens: list[list[int]] = [[] for _ in prompts]
    for index in range(NUM_NEW):
        assert step is not None
        logits[:, index] = step
        chosen = step.argmax(-1).tolist()
        for row, token in enumerate(chosen):
            tokens[row].append(token)
        if index + 1 < NUM_NEW:
            step = driver.step([(row, [token]) for row, token in enumerate(chosen)])
    return tokens, logits


def reference_logits(model: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        output = model(torch.tensor([prompt + tokens[:-1]]), logits_to_keep=NUM_NEW, use_cache=False)
    return output.logits[0]  # type: ignore[no-any-return]


@pytest.mark.timeout(600)
def test_greedy_tokens_equal_transformers_but_for_near_ties(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.set_num_threads(1)  # the products are numpy's; more would spin
    tokenizer = load_tokenizer(find_model("gemma3-270m"))
    prompts = [tokenizer.encode(text).tolist() for text in PROMPTS]
    assert len(prompts[-1]) > WINDOW + NUM_NEW
    tokens, ours = greedy(prompts)
    model = reference_model(path)
    first_ids, margins, errors = [], [], []
    for prompt, chosen, logits in zip(prompts, tokens, ours, strict=True):
        values, ids = reference_logits(model, prompt, chosen).topk(2)
        margin = values[:, 0] - values[:, 1]
        first_ids.append(ids)
        margins.append(margin)
        errors.append(difference(logits, ids) - margin)
    rounded = int8_activations(model)
    rounding = []
    for row in ROUNDED:
        logits = reference_logits(rounded, prompts[row], tokens[row])
        rounding.append(difference(logits, first_ids[row]) - margins[row])
    del model, rounded
    gc.collect()
    margin, expected = torch.stack(margins), rms(torch.stack(rounding))
    error, error_there = rms(torch.stack(errors)), rms(torch.stack([errors[row] for row in ROUNDED]))
    flipped = torch.tensor(tokens) != torch.stack(first_ids)[..., 0]
    near = margin < NEAR_TIE * expected
    with capsys.disabled():
        print(
            f"\ngemma3-270m against transformers: {flipped.numel()} tokens, {int(flipped.sum())} differ, the widest at a margin "
            f"of {float(margin[flipped].max()) if flipped.any() else 0.0:.3f}; {int(near.sum())} near ties (margin below "
            f"{NEAR_TIE * expected:.3f}); rms error of the margin {error:.4f}; where measured {error_there:.4f}, "
            f"of int8 rounding alone {expected:.4f}"
        )
    assert not (flipped & ~near).any()
    assert error_there < 1.5 * expected
    assert error < 2.5 * expected
    assert expected < 0.12 * float(ours.std())
    assert float(flipped.float().mean()) < 0.06


def difference(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Logit of the reference's first choice less that of its second."""
    first, second = logits.gather(-1, ids).unbind(-1)
    return first - second


def rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
