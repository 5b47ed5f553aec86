"""The packaged Gemma 3 270M (Q4_K_M): its windows, its two rotary tables, and the native stage against layer by layer."""

from __future__ import annotations

import pytest
import torch

from tests.models.drive import load, logits_of
from trireme.errors import ModelError
from trireme.model.files import find_model
from trireme.model.reader import read_arch

PROMPT = [2, 818, 5279, 529, 7001, 563]  # "The capital of France is"
MORE = [506, 5279, 529, 506, 2891, 529, 7001, 236761, 1030, 563]


def test_layers_have_their_windows_and_tables() -> None:
    try:
        path = find_model("gemma3-270m").path
    except ModelError as error:
        pytest.skip(str(error))
    arch = read_arch(path)
    assert (arch.family, arch.sliding_window, arch.full_attention_layers) == ("gemma3_text", 512, (5, 11, 17))
    model, layered = load("gemma3-270m", max_len=64), load("gemma3-270m", max_len=64, runtime="torch")
    layers = model.weights.layers
    assert [layer.window for layer in layers] == [None if i % 6 == 5 else 512 for i in range(18)]
    assert layers[5].cos_sin is not layers[4].cos_sin
    tokens = PROMPT + MORE
    assert torch.equal(logits_of(layered, tokens, chunk=5), logits_of(model, tokens))
