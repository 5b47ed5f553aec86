"""/v1/completions: the route, and its answers: chunks, bodies, echo, and log-probabilities as columns."""

from __future__ import annotations

import codecs
import time
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from starlette.types import Receive, Scope, Send

from trireme.errors import RequestError
from trireme.params import SamplingParams
from trireme.serving.api.answer import answer
from trireme.serving.api.openai.echo import Echo, echo_of_ids, echo_of_text
from trireme.serving.api.openai.wire import (
    COMPLETION_TOKENS,
    CompletionRequest,
    delivery_of,
    length_of,
    names_as_written,
    sampling_params,
    split_prompts,
)
from trireme.serving.api.routes import ApiRoute
from trireme.serving.engines.replay import Replay
from trireme.serving.front import Front
from trireme.serving.http.sse import usage_object
from trireme.serving.text.deltas import Content, Delta, Finish, TextLogprob, Usage
from trireme.serving.text.detokenizer import LOOK_BACK, TokenText
from trireme.serving.text.generation import Generation, name_by_id
from trireme.serving.text.processor import Processor

_encode = msgspec.json.encode
_new_decoder = codecs.getincrementaldecoder("utf-8")


async def completions(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises RequestError naming the field, OverloadedError, EngineDeadError."""
    async with front.admit(scope, receive, CompletionRequest) as admitted:
        request = admitted.request
        params = _completion_params(request)
        prompts = split_prompts(request.prompt)
        processor = front.processor

        def work() -> tuple[list[Replay], list[Echo] | None]:
            tokens = _prompt_tokens(processor, request, prompts)
            rows = processor.rows(
                tokens, params, salt=request.cache_salt, terms=admitted.limits, usual_tokens=COMPLETION_TOKENS
            )
            if not request.echo:
                return rows, None
            return rows, [_echo(front, request, prompt, ids) for prompt, ids in zip(prompts, tokens, strict=True)]

        with names_as_written(length_of(request)[1]):
            rows, echoes = await admitted.compute(work)
        delivery = delivery_of(request)

        def format_of(generation: Generation) -> CompletionFormat:
            return CompletionFormat(
                request,
                generation,
                answer_id="cmpl-" + (request.request_id or scope["state"]["request_id"]),
                created=int(time.time()),
                model=front.model.name,
                table=front.table,
                echoes=echoes,
                request_usage=delivery.include_usage,
            )

        await answer(admitted, send, rows, params, format_of, delivery, route="completions")


def _completion_params(request: CompletionRequest) -> SamplingParams:
    if request.prompt_logprobs is not None and request.stream:
        raise RequestError("prompt_logprobs is not supported with stream=true", param="prompt_logprobs")
    echo_logprobs = request.logprobs if request.echo else None
    max_tokens, names = length_of(request)
    with names_as_written(names):
        return sampling_params(
            request,
            max_tokens=max_tokens,
            logprobs=request.logprobs,
            prompt_logprobs=request.prompt_logprobs if request.prompt_logprobs is not None else echo_logprobs,
        )


def _prompt_tokens(
    processor: Processor, request: CompletionRequest, prompts: list[str | list[int]]
) -> list[np.ndarray]:
    found = []
    for i, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            add_special = request.add_special_tokens is not False
            found.append(processor.prompt_from_text(prompt, param=param, add_special=add_special))
        else:
            found.append(processor.prompt_from_ids(prompt, param=param))
    return found


def _echo(front: Front, request: CompletionRequest, prompt: str | list[int], ids: np.ndarray) -> Echo:
    if isinstance(prompt, str):
        return echo_of_text(front.tokenizer, prompt, ids, add_special=request.add_special_tokens is not False)
    return echo_of_ids(front.tokenizer, ids)


class _Columns:
    """Log-probabilities of one choice as the columns of the completions API. A token is listed as the text shows it, at the
    number of whole characters before it; a generated one that the text hides is listed by name, without width."""

    def __init__(self, table: TokenText, *, hidden: frozenset[int], unfinished: bytes, by_id: bool) -> None:
        """`unfinished` are bytes of a prompt that is not shown; the text begins with their character."""
        self._table = table
        self._hidden = hidden
        self._by_id = by_id  # tokens are shown as "token_id:N"
        self._decoder = _new_decoder("replace")
        self._decoder.decode(unfinished)
        self._offset = 0
        self.clear()

    def clear(self) -> None:
        self.tokens: list[str] = []
        self.logprobs: list[float | None] = []
        self.top: list[dict[str, float] | None] = []
        self.offsets: list[int] = []

    def add(self, token: int, entry: TextLogprob) -> None:
        """A generated token."""
        self._append(token, self._name(token), entry)
        if token not in self._hidden:
            self._offset += len(self._decoder.decode(self._table.raw(token)))

    def add_prompt(self, token: int, piece: bytes, entry: TextLogprob | None) -> None:
        """A token of an echoed prompt, `piece` of its text; `entry` is None for the first, which nothing predicted."""
        self._append(token, name_by_id(token) if self._by_id else _shown(piece), entry)
        self._offset += len(self._decoder.decode(piece))

    def _append(self, token: int, name: str, entry: TextLogprob | None) -> None:
        self.tokens.append(name)
        self.offsets.append(self._offset)
        if entry is None:
            self.logprobs.append(None)
            self.top.append(None)
            return
        logprob = max(entry.logprob, -9999.0)
        self.logprobs.append(logprob)
        top = {name if other == token else self._name(other): max(value, -9999.0) for other, value in entry.top}
        top.setdefault(name, logprob)
        self.top.append(top)

    def _name(self, token: int) -> str:
        if self._by_id:
            return name_by_id(token)
        text = self._table[token]
        return text if isinstance(text, str) else _shown(text)

    def as_object(self) -> dict[str, Any]:
        """The `logprobs` object of the completions API."""
        return {
            "tokens": self.tokens,
            "token_logprobs": self.logprobs,
            "top_logprobs": self.top,
            "text_offset": self.offsets,
        }


def _shown(piece: bytes) -> str:
    """Bytes that are no whole characters are spelled out."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in piece)


class _CompletionChoice:
    __slots__ = ("columns", "finish", "has_prompt_ids", "started", "stop", "text", "tokens")

    def __init__(self, columns: _Columns | None) -> None:
        self.columns = columns
        self.started = False
        self.has_prompt_ids = False
        self.text: list[str] = []
        self.tokens: list[int] = []
        self.finish: str | None = None
        self.stop: str | int | None = None


class CompletionFormat:
    """Bytes of one completions answer: streamed chunks or the whole body. `echoes` are the prompts with echo=true."""

    kind = "completion"

    def __init__(
        self,
        request: CompletionRequest,
        generation: Generation,
        *,
        answer_id: str,
        created: int,
        model: str,
        table: TokenText,
        echoes: Sequence[Echo] | None,
        request_usage: bool,
    ) -> None:
        self._generation = generation
        self._echoes = echoes
        self._head = {"id": answer_id, "created": created, "model": model}
        self._with_ids = bool(request.return_token_ids)
        self._with_prompt = request.prompt_logprobs is not None
        self._table = table
        wants = request.logprobs is not None
        hidden = table.special_ids if generation.params.skip_special_tokens else frozenset[int]()
        num_choices = len(generation.replays)
        by_id = bool(request.return_tokens_as_token_ids)
        self._choices = [_CompletionChoice(None) for _ in range(num_choices)]
        for choice, replay in zip(self._choices, generation.replays, strict=True):
            if wants:
                unfinished = b"" if echoes is not None else table.unfinished(replay.prompt[-LOOK_BACK:].tolist())
                choice.columns = _Columns(table, hidden=hidden, unfinished=unfinished, by_id=by_id)
        lead = {"id": answer_id, "object": "text_completion", "created": created, "model": model}
        self._lead = b"data: " + _encode(lead)[:-1] + b',"choices":['
        self._open = [self._lead + b'{"index":%d,"text":' % i for i in range(num_choices)]
        self._close = b'}],"usage":null}\n\n' if request_usage else b"}]}\n\n"
        self._plain_end = b',"logprobs":null,"finish_reason":null' + self._close
        self._is_plain = not wants and not self._with_ids and echoes is None

    def event(self, delta: Delta, usage: Usage | None) -> bytes:
        """The chunk of one delta; b"" when it shows nothing. `usage` is put into the chunk when given."""
        index = delta.choice
        if self._is_plain and usage is None and type(delta) is Content:
            return self._open[index] + _encode(delta.text) + self._plain_end if delta.text else b""
        assert isinstance(delta, Content | Finish), "text completions have no parser"
        finish, stop = (delta.reason, delta.stop) if isinstance(delta, Finish) else (None, None)
        choice = self._choices[index]
        text = self._start(index, choice) + delta.text
        self._count(choice, delta)
        columns = choice.columns
        shows_logprobs = columns is not None and bool(columns.tokens)
        if not (text or shows_logprobs or finish or (self._with_ids and delta.tokens)):
            return b""
        logprobs = b"null"
        if columns is not None and shows_logprobs:
            logprobs = _encode(columns.as_object())
            columns.clear()
        out = self._open[index] + _encode(text) + b',"logprobs":' + logprobs
        out += b',"finish_reason":' + _encode(finish)
        if finish is not None:
            out += b',"stop_reason":' + _encode(stop)
        if self._with_ids:
            out += b',"token_ids":' + _encode(delta.tokens)
            if not choice.has_prompt_ids:
                choice.has_prompt_ids = True
                out += b',"prompt_token_ids":' + _encode(self._generation.replays[index].prompt.tolist())
        return out + (self._close if usage is None else b'}],"usage":' + _encode(usage_object(usage)) + b"}\n\n")

    def usage_event(self, usage: Usage) -> bytes:
        return self._lead + b'],"usage":' + _encode(usage_object(usage)) + b"}\n\n"

    def add(self, delta: Delta) -> None:
        """Collects a delta for `whole`."""
        assert isinstance(delta, Content | Finish), "text completions have no parser"
        choice = self._choices[delta.choice]
        choice.text.append(self._start(delta.choice, choice) + delta.text)
        choice.tokens += delta.tokens
        self._count(choice, delta)
        if isinstance(delta, Finish):
            choice.finish, choice.stop = delta.reason, delta.stop

    def whole(self, generation: Generation) -> bytes:
        """The body of the collected answer."""
        choices: list[dict[str, Any]] = []
        for index, choice in enumerate(self._choices):
            shown: dict[str, Any] = {
                "index": index,
                "text": "".join(choice.text),
                "logprobs": choice.columns.as_object() if choice.columns is not None else None,
                "finish_reason": choice.finish,
                "stop_reason": choice.stop,
            }
            if self._with_ids:
                shown["token_ids"] = choice.tokens
                shown["prompt_token_ids"] = self._generation.replays[index].prompt.tolist()
            if self._with_prompt:
                shown["prompt_logprobs"] = self._prompt_logprobs(index)
            choices.append(shown)
        usage = usage_object(generation.usage())
        return _encode({**self._head, "object": "text_completion", "choices": choices, "usage": usage})

    def _prompt_logprobs(self, index: int) -> list[dict[str, Any] | None]:
        """One entry per prompt token: null for the first, then token id -> what is known of it."""
        known = self._generation.prompt_logprobs.get(index, [])
        found: list[dict[str, Any] | None] = [None] * (len(self._generation.replays[index].prompt) - len(known))
        for entry in known:
            scored = {entry.token: (entry.logprob, entry.rank)}
            for rank, (token, logprob) in enumerate(entry.top, 1):
                scored.setdefault(token, (logprob, rank))
            found.append(
                {
                    str(token): {
                        "logprob": max(logprob, -9999.0),
                        "rank": rank,
                        "decoded_token": self._table.shown(token),
                    }
                    for token, (logprob, rank) in scored.items()
                }
            )
        return found

    def _start(self, index: int, choice: _CompletionChoice) -> str:
        """Once per choice: the echoed prompt, with its log-probabilities."""
        if choice.started or self._echoes is None:
            return ""
        choice.started = True
        replay = self._generation.replays[index]
        echo = self._echoes[replay.prompt_index]
        if choice.columns is not None:
            known = self._generation.prompt_logprobs.get(index, [])
            missing = len(replay.prompt) - len(known)
            for at, (token, piece) in enumerate(zip(replay.prompt.tolist(), echo.pieces, strict=True)):
                entry = known[at - missing] if at >= max(1, missing) else None
                choice.columns.add_prompt(token, piece, entry)
        return echo.text

    def _count(self, choice: _CompletionChoice, delta: Delta) -> None:
        if choice.columns is not None:
            for token, entry in zip(delta.tokens, delta.logprobs or [], strict=False):
                choice.columns.add(token, entry)


ROUTES = (ApiRoute("POST", "/v1/completions", completions),)
