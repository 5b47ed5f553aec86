"""Backends of `chat` and `complete`: a server at --url, or an engine started for the purpose and stopped afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import msgspec

from trireme.config import EngineConfig
from trireme.launch.api.blocking import LoopThread
from trireme.launch.api.http import Endpoint, ServerError, endpoint, first_model, stream
from trireme.launch.options import Invocation
from trireme.params import SamplingParams

Messages = Sequence[dict[str, str]]


class TextPiece(NamedTuple):
    """A piece of generated text; `finish` is set on the last one."""

    text: str
    finish: str | None = None


class ChatBackend(Protocol):
    """Leaving an iterator early, also with Ctrl-C, stops the generation."""

    name: str

    def answer(self, messages: Messages) -> Iterator[TextPiece]: ...

    def complete(self, prompt: str) -> Iterator[TextPiece]: ...

    def close(self) -> None: ...


def make_backend(invocation: Invocation) -> ChatBackend:
    """The backend for --url, or for the engine settings."""
    options, config = invocation.options, invocation.loaded.config
    wanted = {name: options[name] for name in ("max_tokens", "temperature", "seed") if options[name] is not None}
    if options["url"] is not None:
        key = config.serving.api_key[0] if config.serving.api_key else ""
        return RemoteChatBackend(endpoint(options["url"], key), wanted)
    return LocalChatBackend(config, SamplingParams(**wanted), quiet="launch.log_level" not in invocation.loaded.sources)


class LocalChatBackend:
    """An engine in this process tree."""

    def __init__(self, config: EngineConfig, params: SamplingParams, *, quiet: bool) -> None:
        from trireme.launch.api.llm import LLM  # the engine's imports, which a remote conversation does not need

        if quiet:
            launch = msgspec.structs.replace(config.launch, log_level="warning")
            config = msgspec.structs.replace(config, launch=launch)
        self._llm = LLM(config)
        self._params = params
        self.name = self._llm.config.model.served_name or ""

    def answer(self, messages: Messages) -> Iterator[TextPiece]:
        for delta in self._llm.stream_chat(messages, self._params):
            yield TextPiece(delta.text, delta.finish_reason)

    def complete(self, prompt: str) -> Iterator[TextPiece]:
        for delta in self._llm.stream(prompt, self._params):
            yield TextPiece(delta.text, delta.finish_reason)

    def close(self) -> None:
        self._llm.close()


class RemoteChatBackend:
    """A server that speaks the OpenAI API; uses the first model that it lists."""

    def __init__(self, to: Endpoint, wanted: dict[str, Any]) -> None:
        self._to = to
        self._wanted = wanted
        self._loop = LoopThread("chat")
        try:
            self.name = self._loop.wait(first_model(to))
        except BaseException:
            self._loop.close()
            raise

    def answer(self, messages: Messages) -> Iterator[TextPiece]:
        return self._loop.iterate(self._pieces("/v1/chat/completions", {"messages": list(messages)}))

    def complete(self, prompt: str) -> Iterator[TextPiece]:
        return self._loop.iterate(self._pieces("/v1/completions", {"prompt": prompt}))

    async def _pieces(self, path: str, what: dict[str, Any]) -> AsyncGenerator[TextPiece, None]:
        body = {"model": self.name, "stream": True, **self._wanted, **what}
        async for event in stream(self._to, path, body):
            try:
                choices = msgspec.convert(event, _Event).choices or []
            except msgspec.ValidationError as error:
                raise ServerError(f"the server's answer is none of the OpenAI API: {error}") from error
            for found in choices:
                yield TextPiece(found.text or found.delta.content or "", found.finish_reason)

    def close(self) -> None:
        self._loop.close()


class _Delta(msgspec.Struct):
    content: str | None = None


class _LocalChoice(msgspec.Struct):
    text: str | None = None
    delta: _Delta = msgspec.field(default_factory=_Delta)
    finish_reason: str | None = None


class _Event(msgspec.Struct):
    choices: list[_LocalChoice] | None = None
