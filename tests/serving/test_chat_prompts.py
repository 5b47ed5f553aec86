"""Where the prompt of a chat begins and where its answer ends, through HTTP over a real engine: BOS, and the end of a turn."""

from __future__ import annotations

import json
from pathlib import Path

from tests.models.tiny import BOS, EOS, PAD, make_stub
from tests.serving.deployment import serve_model

HI = [{"role": "user", "content": "hi"}]


def adds_bos(model: Path) -> Path:
    """Makes the model's tokenizer put BOS before a text, as Llama's and Gemma's do."""
    file = model / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    single = [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}]
    tokenizer["post_processor"] = {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}},
    }
    file.write_text(json.dumps(tokenizer))
    return model


async def test_a_prompt_has_one_bos_where_the_tokenizer_adds_it(tmp_path: Path) -> None:
    scripts = [["x", EOS]]
    model = adds_bos(make_stub(tmp_path / "model", scripts=scripts, chat_template=None))
    async with serve_model(model) as served:
        _, chat = await served.post("/tokenize", {"messages": HI})
        assert chat["tokens"] == [BOS, *b"user: hi\nassistant:"]
        for prompt in ("hi", "<s>hi"):
            _, text = await served.post("/tokenize", {"prompt": prompt})
            assert text["tokens"] == [BOS, *b"hi"]
            _, answer = await served.post("/v1/completions", {"model": "stub", "prompt": prompt})
            assert answer["usage"]["prompt_tokens"] == 3
        _, text = await served.post("/tokenize", {"prompt": "<s><s>hi", "add_special_tokens": False})
        assert text["tokens"] == [BOS, BOS, *b"hi"]
        _, answer = await served.post("/v1/chat/completions", {"model": "stub", "messages": HI})
        assert answer["usage"]["prompt_tokens"] == len(chat["tokens"])
    plain = make_stub(tmp_path / "plain", scripts=scripts, chat_template=None)
    async with serve_model(plain) as served:
        _, chat = await served.post("/tokenize", {"messages": HI})
        assert chat["tokens"] == list(b"user: hi\nassistant:")
        _, text = await served.post("/tokenize", {"prompt": "<s>hi"})
        assert text["tokens"] == [BOS, *b"hi"]


async def test_a_models_own_template_decides_about_bos(tmp_path: Path) -> None:
    model = adds_bos(make_stub(tmp_path / "model", scripts=[["x", EOS]], chat_template="{{ messages[0].content }}"))
    async with serve_model(model) as served:
        _, chat = await served.post("/tokenize", {"messages": HI})
        assert chat["tokens"] == list(b"hi")


async def test_the_templates_end_of_turn_ends_a_chat(tmp_path: Path) -> None:
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}<pad>\n{% endfor %}"
    scripts = [["ok", PAD, "runs on", EOS]]
    async with serve_model(make_stub(tmp_path / "model", scripts=scripts, chat_template=template)) as served:
        _, answer = await served.post("/v1/chat/completions", {"model": "stub", "messages": HI})
        assert (answer["choices"][0]["message"]["content"], answer["choices"][0]["finish_reason"]) == ("ok", "stop")
        body = {"model": "stub", "messages": HI, "ignore_eos": True, "max_tokens": 6}
        _, answer = await served.post("/v1/chat/completions", body)
        assert answer["choices"][0]["finish_reason"] == "length"
        _, answer = await served.post("/v1/completions", {"model": "stub", "prompt": "hi"})
        assert answer["choices"][0]["text"] == "okruns on"
