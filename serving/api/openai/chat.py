"""/v1/chat/completions: the route, and its answers as streamed chunks or whole bodies."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from trireme.errors import RequestError
from trireme.params import SamplingParams
from trireme.serving.api.answer import answer
from trireme.serving.api.openai.wire import ChatRequest, delivery_of, length_of, names_as_written, sampling_params
from trireme.serving.api.routes import ApiRoute
from trireme.serving.engines.replay import Replay
from trireme.serving.front import Front
from trireme.serving.http.sse import usage_object
from trireme.serving.text.chat_prompt import content_chars
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
from trireme.serving.text.detokenizer import TokenText
from trireme.serving.text.generation import Generation, name_by_id

_encode = msgspec.json.encode


async def chat(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises RequestError naming the field, OverloadedError, EngineDeadError."""
    async with front.admit(scope, receive, ChatRequest) as admitted:
        request = admitted.request
        params = _chat_params(request)
        processor = front.processor
        processor.check_size(sum(map(content_chars, request.messages)), "messages")
        segments = await front.chat_segments(request, admitted.num_bytes)

        def work() -> list[Replay]:
            return processor.rows(
                [processor.prompt_from_segments(segments)],
                params,
                salt=request.cache_salt,
                terms=admitted.limits,
                param="messages",
                end_token_ids=front.chat_ends,
            )

        with names_as_written(length_of(request)[1]):
            rows = await admitted.compute(work)
        delivery = delivery_of(request)

        def format_of(_: Generation) -> ChatFormat:
            return ChatFormat(
                request,
                answer_id="chatcmpl-" + (request.request_id or scope["state"]["request_id"]),
                created=int(time.time()),
                model=front.model.name,
                table=front.table,
                num_choices=len(rows),
                prompt=rows[0].prompt.tolist() if request.return_token_ids else (),
                request_usage=delivery.include_usage,
            )

        await answer(admitted, send, rows, params, format_of, delivery, route="chat")


def _chat_params(request: ChatRequest) -> SamplingParams:
    top = request.top_logprobs
    if top is not None and not request.logprobs and top > 0:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not supported for chat by this server", param="prompt_logprobs")
    max_tokens, names = length_of(request)
    with names_as_written({**names, "logprobs": "top_logprobs"}):
        return sampling_params(
            request, max_tokens=max_tokens, logprobs=(top or 0) if request.logprobs else None, prompt_logprobs=None
        )


class _ShownCall:
    """One call of an answer that is put together."""

    __slots__ = ("arguments", "call_id", "name")

    def __init__(self, begin: ToolCallBegin) -> None:
        self.call_id = begin.call_id
        self.name = begin.name
        self.arguments: list[str] = []

    def as_object(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": "".join(self.arguments)}
        return {"id": self.call_id, "type": "function", "function": function}


class _ChatChoice:
    __slots__ = ("calls", "finish", "has_calls", "logprobs", "reasoning", "started", "stop", "text", "tokens")

    def __init__(self) -> None:
        self.started = False
        self.has_calls = False
        self.text: list[str] = []
        self.reasoning: list[str] = []
        self.calls: list[_ShownCall] = []
        self.tokens: list[int] = []
        self.logprobs: list[TextLogprob] = []
        self.finish: str | None = None
        self.stop: str | int | None = None

    def reason(self, finish: Finish) -> str:
        """OpenAI's name for why it ended."""
        return "tool_calls" if self.has_calls and finish.reason == "stop" else finish.reason


class ChatFormat:
    """Bytes of one chat answer: streamed chunks or the whole body. Chunks are put together from prepared pieces."""

    kind = "chat"

    def __init__(
        self,
        request: ChatRequest,
        *,
        answer_id: str,
        created: int,
        model: str,
        table: TokenText,
        num_choices: int,
        prompt: Sequence[int],
        request_usage: bool,
    ) -> None:
        """`prompt` are the ids of the prompt, told with `return_token_ids`: in a stream with its first chunk."""
        self._head = {"id": answer_id, "created": created, "model": model}
        self._table = table
        self._wants_logprobs = bool(request.logprobs)
        self._with_ids = bool(request.return_token_ids)
        self._prompt = list(prompt) if self._with_ids else []
        self._is_begun = False
        self._names_by_id = bool(request.return_tokens_as_token_ids)
        self._choices = [_ChatChoice() for _ in range(num_choices)]
        lead = {"id": answer_id, "object": "chat.completion.chunk", "created": created, "model": model}
        self._lead = b"data: " + _encode(lead)[:-1] + b',"choices":['
        self._open = [self._lead + b'{"index":%d,"delta":{"content":' % i for i in range(num_choices)]
        self._close = b'}],"usage":null}\n\n' if request_usage else b"}]}\n\n"
        self._is_plain = not self._wants_logprobs and not self._with_ids
        self._plain_end = b'},"logprobs":null,"finish_reason":null' + self._close

    def event(self, delta: Delta, usage: Usage | None) -> bytes:
        """The chunk(s) of one delta; b"" when it shows nothing. `usage` is put into each chunk when given."""
        choice = self._choices[delta.choice]
        out = b"" if choice.started else self._start(choice, delta, usage)
        if type(delta) is Content:
            if self._is_plain and usage is None:
                return out + self._open[delta.choice] + _encode(delta.text) + self._plain_end if delta.text else out
            return out + self._content(delta, delta.text, usage)
        if type(delta) is Finish:
            out += self._content(delta, delta.text, usage)
            out += self._lead + b'{"index":%d,"delta":{},"logprobs":null,"finish_reason":' % delta.choice
            return out + _encode(choice.reason(delta)) + b',"stop_reason":' + _encode(delta.stop) + self._end(usage)
        return out + self._parsed(choice, delta, usage)

    def _start(self, choice: _ChatChoice, delta: Delta, usage: Usage | None) -> bytes:
        """The chunk with the role, and in the first one of a stream the ids of the prompt."""
        choice.started = True
        out = self._lead + (
            b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null' % delta.choice
        )
        if usage is not None:  # it comes before the tokens of this delta
            before = usage.completion_tokens - len(delta.tokens)
            out += self._end(msgspec.structs.replace(usage, completion_tokens=before))
        else:
            out += self._close
        if self._with_ids and not self._is_begun:
            out = out[: -len(b"}\n\n")] + b',"prompt_token_ids":' + _encode(self._prompt) + b"}\n\n"
        self._is_begun = True
        return out

    def _content(self, delta: Delta, text: str, usage: Usage | None) -> bytes:
        """The chunk of `text`; b"" when there is none and nothing else to show."""
        if text or (self._wants_logprobs and delta.logprobs) or (self._with_ids and delta.tokens):
            return self._chunk(delta, b'"content":' + _encode(text), usage)
        return b""

    def _parsed(self, choice: _ChatChoice, delta: Delta, usage: Usage | None) -> bytes:
        """The chunk of reasoning or of a tool call."""
        if isinstance(delta, Reasoning):
            if not delta.text:
                return self._content(delta, "", usage)
            return self._chunk(delta, b'"reasoning_content":' + _encode(delta.text), usage)
        call: dict[str, Any]
        if isinstance(delta, ToolCallBegin):
            choice.has_calls = True
            function = {"name": delta.name, "arguments": ""}
            call = {"index": delta.index, "id": delta.call_id, "type": "function", "function": function}
        else:
            assert isinstance(delta, ToolCallArguments)
            call = {"index": delta.index, "function": {"arguments": delta.text}}
        return self._chunk(delta, b'"tool_calls":' + _encode([call]), usage)

    def _chunk(self, delta: Delta, shown: bytes, usage: Usage | None) -> bytes:
        """One chunk with `shown` as the fields of its delta."""
        logprobs = self._logprobs(delta.logprobs) if self._wants_logprobs and delta.logprobs else b"null"
        ids = b',"token_ids":' + _encode(delta.tokens) if self._with_ids else b""
        out = self._lead + b'{"index":%d,"delta":{' % delta.choice + shown
        return out + b'},"logprobs":' + logprobs + b',"finish_reason":null' + ids + self._end(usage)

    def _end(self, usage: Usage | None) -> bytes:
        return self._close if usage is None else b'}],"usage":' + _encode(usage_object(usage)) + b"}\n\n"

    def usage_event(self, usage: Usage) -> bytes:
        return self._lead + b'],"usage":' + _encode(usage_object(usage)) + b"}\n\n"

    def add(self, delta: Delta) -> None:
        """Collects a delta for `whole`."""
        choice = self._choices[delta.choice]
        choice.tokens += delta.tokens
        if delta.logprobs:
            choice.logprobs += delta.logprobs
        if isinstance(delta, Content | Finish):
            choice.text.append(delta.text)
            if isinstance(delta, Finish):
                choice.finish, choice.stop = choice.reason(delta), delta.stop
        elif isinstance(delta, Reasoning):
            choice.reasoning.append(delta.text)
        elif isinstance(delta, ToolCallBegin):
            choice.has_calls = True
            choice.calls.append(_ShownCall(delta))
        else:
            choice.calls[delta.index].arguments.append(delta.text)

    def whole(self, generation: Generation) -> bytes:
        """The body of the collected answer."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.text)
            content = None if choice.calls and not text else text
            message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
            if choice.reasoning:
                message["reasoning_content"] = "".join(choice.reasoning)
            if choice.calls:
                message["tool_calls"] = [call.as_object() for call in choice.calls]
            shown: dict[str, Any] = {
                "index": index,
                "message": message,
                "logprobs": msgspec.Raw(self._logprobs(choice.logprobs)) if self._wants_logprobs else None,
                "finish_reason": choice.finish,
                "stop_reason": choice.stop,
            }
            if self._with_ids:
                shown["token_ids"] = choice.tokens
            choices.append(shown)
        usage = usage_object(generation.usage())
        answer = {**self._head, "object": "chat.completion", "choices": choices, "usage": usage}
        if self._with_ids:
            answer["prompt_token_ids"] = self._prompt
        return _encode(answer)

    def _logprobs(self, entries: Sequence[TextLogprob]) -> bytes:
        content = [
            {
                **self._one(entry.token, entry.logprob),
                "top_logprobs": [self._one(token, logprob) for token, logprob in entry.top],
            }
            for entry in entries
        ]
        return _encode({"content": content, "refusal": None})

    def _one(self, token: int, logprob: float) -> dict[str, Any]:
        raw = self._table.raw(token)
        name = name_by_id(token) if self._names_by_id else self._table.shown(token)
        return {"token": name, "logprob": max(logprob, -9999.0), "bytes": list(raw)}


ROUTES = (ApiRoute("POST", "/v1/chat/completions", chat),)
