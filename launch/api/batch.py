"""Requests of the Python API: from prompts and SamplingParams to validated submits, from engine events to RequestOutputs.

Used by launch/api/session.py only. The work is done by serving's processor, client and generation; this file connects them.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import msgspec
import numpy as np

from trireme import plain
from trireme.config import EngineConfig
from trireme.errors import RequestError
from trireme.model.files import files_of
from trireme.model.reader import read_arch
from trireme.outputs import CompletionOutput, OutputDelta, RequestOutput, TokenLogprob
from trireme.params import SamplingParams
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.replay import Replay
from trireme.serving.text.chat_prompt import ChatPrompt, ChatRenderer
from trireme.serving.text.deltas import Finish, TextDelta
from trireme.serving.text.deltas import TextLogprob as Scored
from trireme.serving.text.detokenizer import TokenText
from trireme.serving.text.generation import Generation
from trireme.serving.text.processor import Processor
from trireme.serving.text.templates import find_template
from trireme.serving.text.tokens import Tokenizer, load_tokenizer
from trireme.transport.wire.messages import EngineFacts


class PromptSource(NamedTuple):
    """A caller's prompt: a text, token ids, or the messages of a conversation. Exactly one is set."""

    text: str | None = None
    ids: Sequence[int] | None = None
    messages: Sequence[Mapping[str, Any]] | None = None

    @classmethod
    def raw(cls, prompt: str | Sequence[int] | np.ndarray, *, param: str = "prompt") -> PromptSource:
        """From a text or token ids. Raises RequestError naming `param` for anything else."""
        if isinstance(prompt, str):
            return cls(text=prompt)
        if prompt is None or not isinstance(prompt, np.ndarray | Sequence) or isinstance(prompt, bytes | bytearray):
            raise RequestError(
                f"{param} is {plain.shown(prompt)}; a prompt is a text or a list of token ids", param=param
            )
        return cls(ids=plain.token_ids(param, prompt.tolist() if isinstance(prompt, np.ndarray) else prompt))

    @classmethod
    def conversation(cls, messages: Sequence[Mapping[str, Any]]) -> PromptSource:
        return cls(messages=messages)


class BatchRequest(NamedTuple):
    """A validated request: all its choices, ready to submit."""

    prompt: str | None
    params: SamplingParams
    rows: list[Replay]

    @property
    def num_tokens(self) -> int:
        return sum(len(row.prompt) for row in self.rows)


class TextSide:
    """Tokenizer, chat template and validation of one model. Thread-safe once its facts are set."""

    def __init__(self, config: EngineConfig, tokenizer: Tokenizer, eos_token_ids: Sequence[int]) -> None:
        self.tokenizer = tokenizer
        self.table = TokenText(tokenizer)
        special = tokenizer.special_names
        template = find_template(
            override=config.model.chat_template,
            own=tokenizer.chat_template,
            special_tokens=tokenizer.special_tokens,
            special_texts=special,
            added_bos=tokenizer.added_bos,
        )
        own_eos = tokenizer.eos_token_id
        self._eos = {*eos_token_ids} | ({own_eos} if own_eos is not None else set())
        self._renderer = ChatRenderer(template, special)
        self._chat_ends = tokenizer.ids_of(self._renderer.end_of_turn)
        self._default_max_tokens = config.serving.default_max_tokens
        self._processor: Processor | None = None

    @classmethod
    def load(cls, config: EngineConfig) -> TextSide:
        files = files_of(config.model)
        tokenizer = load_tokenizer(files, tokenizer=config.model.tokenizer)
        return cls(config, tokenizer, read_arch(files).eos_token_ids)

    def set_facts(self, facts: EngineFacts) -> None:
        """Sets the engines' facts, known once they run. Offline requests may wait in the queue without limit."""
        self._processor = Processor(
            self.tokenizer,
            max_len=facts.max_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=self._eos,
            default_max_tokens=self._default_max_tokens,
        )

    def request(self, source: PromptSource, params: SamplingParams, salt: str | None) -> BatchRequest:
        """Validates and tokenizes a prompt. Raises RequestError that names the field at fault."""
        processor = self._processor
        assert processor is not None, "set_facts first"
        if not isinstance(params, SamplingParams):
            raise RequestError(f"params is {plain.shown(params)}; it must be SamplingParams(...)", param="params")
        if not isinstance(salt, str | None):
            raise RequestError(f"salt is {plain.shown(salt)}; it must be a text", param="salt")
        if source.messages is not None:
            segments = self._renderer.segments(self._chat_request(source.messages))
            prompt = processor.prompt_from_segments(segments)
            return BatchRequest(
                None, params, processor.rows([prompt], params, salt=salt, end_token_ids=self._chat_ends)
            )
        if source.text is not None:
            ids = processor.prompt_from_text(source.text)
        else:
            ids = processor.prompt_from_ids(source.ids or ())
        return BatchRequest(source.text, params, processor.rows([ids], params, salt=salt))

    @staticmethod
    def _chat_request(messages: Any) -> ChatPrompt:
        if isinstance(messages, str) or not isinstance(messages, Sequence):
            raise RequestError(f"the conversation is {plain.shown(messages)}, not a list of messages", param="messages")
        try:
            return msgspec.convert({"messages": list(messages)}, ChatPrompt)
        except msgspec.ValidationError as error:
            raise RequestError(f"the conversation is not a list of messages: {error}", param="messages") from error


class InFlight:
    """Keeps a large batch from overrunning the engines' queues by bounding both the sequences and the prompt tokens in flight.

    First come, first served; a request larger than the bound runs alone.
    """

    def __init__(self, max_rows: int, max_tokens: int) -> None:
        self._max = (max_rows, max_tokens)
        self._used = [0, 0]
        self._waiting: deque[tuple[BatchRequest, asyncio.Future[None]]] = deque()

    @classmethod
    def for_engines(cls, facts: EngineFacts, num_engines: int) -> InFlight:
        """Half of the queues: enough to keep every batch full, with a margin against rejections."""
        rows = facts.max_num_seqs + facts.max_waiting // 2
        return cls(rows * num_engines, max(1, facts.max_waiting_tokens // 2) * num_engines)

    @asynccontextmanager
    async def room_for(self, request: BatchRequest) -> AsyncIterator[None]:
        """Waits until the request fits, and reserves its share while the context lasts."""
        if self._waiting or not self._fits(request):
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((request, turn))
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._give_back(request)
                raise
        else:
            self._take(request)
        try:
            yield
        finally:
            self._give_back(request)

    def _fits(self, request: BatchRequest) -> bool:
        need = (len(request.rows), request.num_tokens)
        return not any(self._used) or all(u + n <= m for u, n, m in zip(self._used, need, self._max, strict=True))

    def _take(self, request: BatchRequest) -> None:
        self._used[0] += len(request.rows)
        self._used[1] += request.num_tokens

    def _give_back(self, request: BatchRequest) -> None:
        self._used[0] -= len(request.rows)
        self._used[1] -= request.num_tokens
        while self._waiting and (self._waiting[0][1].cancelled() or self._fits(self._waiting[0][0])):
            waiting, turn = self._waiting.popleft()
            if not turn.cancelled():
                self._take(waiting)
                turn.set_result(None)


# ---------------------------------------------------------------- running one request


async def stream_request(
    client: EngineClient, text: TextSide, request: BatchRequest
) -> AsyncGenerator[OutputDelta, None]:
    """Deltas of all choices until the last has ended; leaving early aborts. Raises EngineDeadError and other EngineErrors."""
    generation = Generation(client, text.table, request.rows, request.params)
    try:
        await generation.submit()
        async for deltas in generation.deltas():
            for delta in deltas:
                yield _output_delta(delta)
    finally:
        generation.close()


async def run_request(client: EngineClient, text: TextSide, request: BatchRequest) -> RequestOutput:
    """All choices, complete."""
    generation = Generation(client, text.table, request.rows, request.params)
    parts = [_BatchChoice() for _ in request.rows]
    try:
        await generation.submit()
        async for deltas in generation.deltas():
            for delta in deltas:
                parts[delta.choice].add(delta)
    finally:
        generation.close()
    start, first, last = generation.start, generation.first, generation.last
    scores = generation.prompt_logprobs.get(0)
    return RequestOutput(
        prompt=request.prompt,
        prompt_token_ids=tuple(request.rows[0].prompt.tolist()),
        outputs=tuple(part.output(i) for i, part in enumerate(parts)),
        prompt_logprobs=None if scores is None else tuple(map(_logprob, scores)),
        num_cached_tokens=generation.usage().cached_tokens,
        first_token_s=None if first is None else first - start,
        total_s=0.0 if last is None else last - start,
    )


class _BatchChoice:
    """One choice while its deltas are collected."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self.tokens: list[int] = []
        self.logprobs: list[TokenLogprob] | None = None
        self.finish: str | None = None
        self.stop: str | int | None = None

    def add(self, delta: TextDelta) -> None:
        """Appends one delta's text, tokens, logprobs and finish reason."""
        self.texts.append(delta.text)
        self.tokens += delta.tokens
        if delta.logprobs is not None:
            self.logprobs = (self.logprobs or []) + [_logprob(scored) for scored in delta.logprobs]
        if isinstance(delta, Finish):
            self.finish, self.stop = delta.reason, delta.stop

    def output(self, index: int) -> CompletionOutput:
        """The complete choice, as number `index`."""
        return CompletionOutput(
            index=index,
            text="".join(self.texts),
            token_ids=tuple(self.tokens),
            finish_reason=self.finish,
            stop_reason=self.stop,
            logprobs=None if self.logprobs is None else tuple(self.logprobs),
        )


def _output_delta(delta: TextDelta) -> OutputDelta:
    reason, stop = (delta.reason, delta.stop) if isinstance(delta, Finish) else (None, None)
    return OutputDelta(
        index=delta.choice,
        text=delta.text,
        token_ids=tuple(delta.tokens),
        finish_reason=reason,
        stop_reason=stop,
        logprobs=None if delta.logprobs is None else tuple(map(_logprob, delta.logprobs)),
    )


def _logprob(scored: Scored) -> TokenLogprob:
    return TokenLogprob(scored.token, scored.logprob, scored.rank, tuple(scored.top))
