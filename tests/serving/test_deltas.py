"""Deltas of reasoning and tool calls on OpenAI's wire: chunks that the official client reads, and streamed = whole."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.serving.test_detokenizer import TABLE
from trireme.serving.api.openai.chat import ChatFormat
from trireme.serving.api.openai.wire import ChatRequest
from trireme.serving.text.chat_prompt import Message
from trireme.serving.text.deltas import (
    Content,
    Delta,
    Finish,
    Reasoning,
    TextLogprob,
    ToolCallArguments,
    ToolCallBegin,
    Usage,
)

USAGE = Usage(prompt_tokens=7, completion_tokens=9, cached_tokens=3)
TWO_CALLS: list[Delta] = [
    Reasoning(0, [65], None, "I need "),
    Reasoning(0, [66, 67], None, "the weather"),
    Content(0, [68], None, "Let me look."),
    ToolCallBegin(0, [69], None, 0, "call_1", "weather"),
    ToolCallArguments(0, [70], None, 0, '{"city": '),
    ToolCallArguments(0, [71], None, 0, '"Bern"}'),
    ToolCallBegin(0, [72], None, 1, "call_2", "time"),
    ToolCallArguments(0, [73], None, 1, "{}"),
    Finish(0, [], None, "stop"),
]


class Counted:
    """What ChatFormat.whole needs of a Generation."""

    def usage(self) -> Usage:
        return USAGE


def chat_format(**fields: Any) -> ChatFormat:
    request = ChatRequest(messages=[Message(role="user", content="hi")], **fields)
    return ChatFormat(
        request,
        answer_id="chatcmpl-1",
        created=1,
        model="stub",
        table=TABLE,
        num_choices=1,
        prompt=(),
        request_usage=False,
    )


def chunks(deltas: Sequence[Delta], **fields: Any) -> list[dict[str, Any]]:
    form = chat_format(**fields)
    events = b"".join(form.event(delta, None) for delta in deltas).decode().split("\n\n")
    return [json.loads(event.removeprefix("data: ")) for event in events if event]


def whole(deltas: Sequence[Delta], **fields: Any) -> dict[str, Any]:
    form = chat_format(**fields)
    for delta in deltas:
        form.add(delta)
    answer: dict[str, Any] = json.loads(form.whole(Counted()))  # type: ignore[arg-type]
    return answer


def joined(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The message that a client puts together from chunks, with its finish reason."""
    texts = {"content": "", "reasoning_content": ""}
    calls: list[dict[str, Any]] = []
    finish = None
    for chunk in found:
        (choice,) = chunk["choices"]
        for name in texts:
            texts[name] += choice["delta"].get(name, "")
        for call in choice["delta"].get("tool_calls", ()):
            if "id" in call:
                assert call["index"] == len(calls)
                calls.append({"id": call["id"], "type": call["type"], "function": dict(call["function"])})
            else:
                calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
        finish = choice["finish_reason"] or finish
    return {**{name: text for name, text in texts.items() if text}, "tool_calls": calls, "finish": finish}


@pytest.mark.parametrize(
    "deltas",
    [
        TWO_CALLS,
        [delta for delta in TWO_CALLS if not isinstance(delta, Content)],
        [delta for delta in TWO_CALLS if not isinstance(delta, Reasoning)],
        [delta for delta in TWO_CALLS if isinstance(delta, Reasoning | Content | Finish)],
        [Reasoning(0, [65], None, "hm"), Finish(0, [], None, "length", None, "tail")],
    ],
    ids=["all", "no content", "no reasoning", "no calls", "cut off"],
)
def test_streamed_is_whole(deltas: list[Delta]) -> None:
    (choice,) = whole(deltas)["choices"]
    message = choice["message"]
    expected = {name: message[name] for name in ("content", "reasoning_content") if message.get(name)}
    expected |= {"tool_calls": message.get("tool_calls", []), "finish": choice["finish_reason"]}
    assert joined(chunks(deltas)) == expected


def test_tool_calls_have_the_shape_of_openai() -> None:
    found = chunks(TWO_CALLS)
    read = [ChatCompletionChunk.model_validate(chunk) for chunk in found]
    calls = [call for chunk in read for call in chunk.choices[0].delta.tool_calls or ()]
    assert [(call.index, call.id) for call in calls] == [(0, "call_1"), (0, None), (0, None), (1, "call_2"), (1, None)]
    assert read[0].choices[0].delta.role == "assistant"
    assert read[-1].choices[0].finish_reason == "tool_calls"
    message = ChatCompletion.model_validate(whole(TWO_CALLS)).choices[0].message
    assert message.tool_calls is not None
    assert [call.function.arguments for call in message.tool_calls if call.type == "function"] == [
        '{"city": "Bern"}',
        "{}",
    ]


def test_content_is_null_only_beside_calls() -> None:
    calls = [delta for delta in TWO_CALLS if not isinstance(delta, Content)]
    assert whole(calls)["choices"][0]["message"]["content"] is None
    assert whole([Finish(0, [], None, "stop")])["choices"][0]["message"]["content"] == ""


def test_a_call_cut_off_ends_for_its_length() -> None:
    cut = [*TWO_CALLS[:5], Finish(0, [], None, "length")]
    assert whole(cut)["choices"][0]["finish_reason"] == "length"
    assert joined(chunks(cut))["finish"] == "length"


def test_token_ids_and_logprobs_are_those_of_all_pieces() -> None:
    fields = {"return_token_ids": True, "logprobs": True}
    deltas = [
        msgspec.structs.replace(delta, logprobs=[TextLogprob(token, -1.0, 1, []) for token in delta.tokens])
        for delta in TWO_CALLS
    ]
    body = whole(deltas, **fields)["choices"][0]
    streamed = [chunk["choices"][0] for chunk in chunks(deltas, **fields)]
    ids = [token for choice in streamed for token in choice.get("token_ids", ())]
    logprobs = [entry for choice in streamed if choice["logprobs"] for entry in choice["logprobs"]["content"]]
    assert ids == body["token_ids"] == list(range(65, 74))
    assert logprobs == body["logprobs"]["content"]
    assert len(logprobs) == 9
