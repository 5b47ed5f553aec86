"""Rows of a model's matrices beyond its tokenizer are never sampled, and every other token comes as it would without them."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest

from tests.models.tiny import make_stub, make_tiny_llama, write_byte_tokenizer, write_spm_tokenizer
from tests.models.tiny_gguf import TOKEN_CONTROL, TOKEN_NORMAL, write_tokenizer_gguf
from tests.serving.deployment import serve_model
from trireme.config import ModelConfig
from trireme.launch.api.llm import LLM
from trireme.model.files import find_model
from trireme.model.vocabulary import num_known_tokens
from trireme.params import SamplingParams

UNUSED = 5  # tokenizer.ggml.token_type


def known(path: Path, **changes: Any) -> int | None:
    return num_known_tokens(ModelConfig(model=str(path), **changes))


def padded_stub(directory: Path, logits: dict[int, float], size: int = 300) -> Path:
    """Logits for `size` tokens, a tokenizer of 259."""
    make_stub(directory, "const", logits=logits, default=-20.0, vocab_size=size)
    write_byte_tokenizer(directory)
    return directory


def test_what_a_tokenizer_knows(tmp_path: Path) -> None:
    stub = padded_stub(tmp_path / "m", {})
    assert known(stub) == 259
    write_spm_tokenizer(tmp_path / "spm")
    assert known(stub, tokenizer=str(tmp_path / "spm")) == 268
    document = json.loads((stub / "tokenizer.json").read_text())
    document["added_tokens"].append({**document["added_tokens"][0], "id": 270, "content": "<new>"})
    (stub / "tokenizer.json").write_text(json.dumps(document))
    assert known(stub) == 271
    document["model"] = {"type": "Unigram", "unk_id": 0, "vocab": [["a", -1.0]] * 280}
    (stub / "tokenizer.json").write_text(json.dumps(document))
    assert known(stub) == 280
    (stub / "tokenizer.json").write_text("{")
    assert known(stub) is None
    (stub / "tokenizer.json").unlink()
    assert known(stub) is None
    assert known(find_model("smollm2").path) == 49152


def test_what_a_gguf_file_knows(tmp_path: Path) -> None:
    """Unused tokens at the end that are named by their id fill the list up; others are the vocabulary's own."""
    tokens = ["<s>", "a", "b", "<spare>", "[PAD4]", "[PAD5]"]
    kinds = [TOKEN_CONTROL, TOKEN_NORMAL, TOKEN_NORMAL, UNUSED, UNUSED, UNUSED]
    stub = padded_stub(tmp_path / "m", {})
    path = write_tokenizer_gguf(tmp_path / "v.gguf", model="gpt2", tokens=tokens, kinds=kinds, pre="gpt-2")
    assert known(stub, tokenizer=str(path)) == 4
    kinds[5] = TOKEN_NORMAL
    path = write_tokenizer_gguf(tmp_path / "w.gguf", model="gpt2", tokens=tokens, kinds=kinds, pre="gpt-2")
    assert known(stub, tokenizer=str(path)) == 6


async def test_ids_beyond_the_tokenizer_are_not_sampled(tmp_path: Path) -> None:
    model = padded_stub(tmp_path / "m", {280: 9.0, 299: 8.0, 97: 2.0, 98: 1.0})
    body: dict[str, Any] = {"model": "stub", "prompt": "x", "max_tokens": 6, "return_token_ids": True}
    async with serve_model(model) as served:

        async def ids(**fields: Any) -> list[int]:
            status, answer = await served.post("/v1/completions", {**body, **fields})
            assert status == 200, answer
            found: list[int] = answer["choices"][0]["token_ids"]
            return found

        assert await ids(temperature=0) == [97] * 6
        assert set(await ids(temperature=1.0, max_tokens=64)) <= {97, 98}
        for limits in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.01}, {"repetition_penalty": 1.1}):
            assert set(await ids(temperature=1.0, seed=7, max_tokens=64, **limits)) <= {97, 98}
        assert await ids(temperature=0, logit_bias={"97": -50}) == [98] * 6
        assert await ids(temperature=0, allowed_token_ids=[98, 99]) == [98] * 6
        status, answer = await served.post("/v1/completions", {**body, "temperature": 0, "logprobs": 5, "echo": True})
        columns = answer["choices"][0]["logprobs"]
        assert "" not in columns["tokens"]
        assert all("" not in row for row in columns["top_logprobs"][1:])
        assert columns["token_logprobs"][-1] == pytest.approx(-0.3133, abs=1e-3)  # of the tokens there are
        for field in ({"prompt": [280]}, {"logit_bias": {"259": 1}}, {"allowed_token_ids": [299]}):
            status, answer = await served.post("/v1/completions", {**body, **field})
            assert status == 400
            assert "0..258" in answer["error"]["message"]


@pytest.mark.parametrize("tp", [1, 2])
def test_other_tokens_come_as_they_would(tmp_path: Path, tp: int) -> None:
    """A model whose tokenizer knows all but the last tokens, against the same with those barred one by one."""
    whole, padded = make_tiny_llama(tmp_path / "whole"), make_tiny_llama(tmp_path / "padded")
    write_byte_tokenizer(padded)  # 259 of 320
    params = SamplingParams(max_tokens=40, temperature=1.5, seed=11, ignore_eos=True, logprobs=0)
    masked = SamplingParams(
        max_tokens=40, temperature=1.5, seed=11, ignore_eos=True, allowed_token_ids=tuple(range(259))
    )
    with LLM(str(padded), tp=tp, kv_memory="4MiB") as llm:
        found = llm.generate("once upon", params).outputs[0]
        assert llm.config.model.model == str(padded)
    with LLM(str(whole), tp=tp, kv_memory="4MiB") as llm:
        wanted = llm.generate("once upon", masked).outputs[0]
        free = llm.generate("once upon", params).outputs[0]
    assert found.token_ids == wanted.token_ids
    assert max(found.token_ids) < 259 <= max(free.token_ids)


def test_reading_a_large_vocabulary_takes_no_time(tmp_path: Path) -> None:
    make_stub(tmp_path)
    write_byte_tokenizer(tmp_path, size=260_000)
    begun = time.process_time()
    assert known(tmp_path) == 260_000
    assert time.process_time() - begun < 1.0  # usual is 0.1 s
