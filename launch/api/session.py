"""Requests to engines from Python, async and blocking: the common base of LLM and Client. Independent of how engines were started.

AsyncSession   one asyncio loop; base of AsyncLLM and AsyncClient
Session        its blocking twin with a loop in a thread; base of LLM and Client
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Self, TypeAlias, overload

import numpy as np

from trireme.config import Decision, EngineConfig
from trireme.errors import EngineDeadError
from trireme.launch.api.batch import BatchRequest, InFlight, PromptSource, TextSide, run_request, stream_request
from trireme.launch.api.blocking import LoopThread
from trireme.launch.api.deployment import Deployment
from trireme.launch.api.startup import breakdown
from trireme.launch.api.view import ProgressView
from trireme.outputs import OutputDelta, RequestOutput
from trireme.params import SamplingParams
from trireme.plain import series
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.engine import EngineState
from trireme.sleep import RESTING
from trireme.topology.lockstep import pause_mode
from trireme.transport.wire.messages import Progress

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray"
"""A text, or token ids."""
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"
"""A conversation in the OpenAI form: `[{"role": "user", "content": "..."}]`."""

CONNECT_TIMEOUT_S = 30.0
REST_S = 300.0  # timeout of falling asleep or waking


class AsyncSession:
    """Requests to one deployment from one asyncio loop. `async with ... as session`, or `start` and `close`."""

    def __init__(
        self,
        config: EngineConfig,
        decisions: list[Decision],
        deployment: Deployment,
        view: ProgressView,
        *,
        launched: float | None = None,
    ) -> None:
        self.config = config  # the resolved settings
        self.decisions = decisions  # what was resolved, and why
        self.startup: dict[str, float] = {}  # seconds of each part of the start; they add up to the whole
        self._launched = time.monotonic() if launched is None else launched
        self._deployment = deployment
        self._view = view
        self._client: EngineClient | None = None
        self._text: TextSide | None = None
        self._in_flight: InFlight | None = None

    async def start(self) -> None:
        """Returns when every engine can answer; raises the error of one that cannot."""
        try:
            text = await self._load()
            client = self._client = self._deployment.client()
            client.start()
            await self._connect(client)
        except BaseException:
            await self.close()
            raise
        finally:
            self._view.close()
        self.startup = breakdown(self._launched, self._deployment.lives, time.monotonic(), "client")
        self._view.started(self.startup)
        facts = client.facts
        assert facts is not None
        text.set_facts(facts)
        self._text = text
        self._in_flight = InFlight.for_engines(facts, self.config.parallel.dp)

    async def _load(self) -> TextSide:
        """Loads the tokenizer and starts the engines concurrently; returns when both are ready."""
        text, engines = await asyncio.gather(
            asyncio.to_thread(TextSide.load, self.config),
            asyncio.to_thread(self._deployment.start),
            return_exceptions=True,
        )
        for failed in (engines, text):
            if isinstance(failed, BaseException):
                raise failed
        assert isinstance(text, TextSide)
        return text

    @staticmethod
    async def _connect(client: EngineClient) -> None:
        try:
            await client.wait_up(CONNECT_TIMEOUT_S)
        except TimeoutError:
            down = [state for state in client.states() if not state.is_up]
            reasons = "; ".join(f"engine {state.engine}: {state.reason}" for state in down)
            raise EngineDeadError(f"no connection within {CONNECT_TIMEOUT_S:g} s: {reasons}") from None

    async def close(self) -> None:
        """Aborts running requests and releases the engines. May be called twice."""
        if self._client is not None:
            self._client.close()
            self._client = None
        await asyncio.to_thread(self._deployment.close)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ requests

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> RequestOutput:
        """The complete output. Cancelling the task aborts the request."""
        return await self.run(self.prepare(PromptSource.raw(prompt), params, salt))

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> RequestOutput:
        """The answer to a conversation, through the model's chat template."""
        return await self.run(self.prepare(PromptSource.conversation(messages), params, salt))

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Token by token. Closing the generator (contextlib.aclosing) aborts the request."""
        return self._stream(PromptSource.raw(prompt), params, salt)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """The answer to a conversation, token by token."""
        return self._stream(PromptSource.conversation(messages), params, salt)

    def prepare(self, source: PromptSource, params: SamplingParams | None, salt: str | None = None) -> BatchRequest:
        """Tokenizes and checks; raises RequestError before anything is sent."""
        return self._ready()[1].request(source, SamplingParams() if params is None else params, salt)

    async def run(self, request: BatchRequest) -> RequestOutput:
        """Runs a prepared request as soon as the engines have room for it."""
        client, text, in_flight = self._ready()
        async with in_flight.room_for(request):
            return await run_request(client, text, request)

    async def _stream(
        self, source: PromptSource, params: SamplingParams | None, salt: str | None
    ) -> AsyncGenerator[OutputDelta, None]:
        client, text, in_flight = self._ready()
        request = self.prepare(source, params, salt)
        async with in_flight.room_for(request), aclosing(stream_request(client, text, request)) as deltas:
            async for delta in deltas:
                yield delta

    # ------------------------------------------------------------ state

    @property
    def vocab_size(self) -> int:
        """Number of token ids."""
        facts = self._ready()[0].facts
        assert facts is not None
        return facts.vocab_size

    def health(self) -> list[EngineState]:
        """State of each engine: up, or down and why; its epoch, our requests in it, seconds without progress."""
        return self._ready()[0].states()

    async def stats(self, engine: int = 0) -> dict[str, Any]:
        """Counters and load of one engine. Raises EngineDeadError when it is down."""
        found: dict[str, Any] = await self._ready()[0].call(engine, "stats")
        return found

    async def sleep(self, level: int = 1) -> None:
        """Releases GPU memory until there is work again: level 1 keeps the weights in host memory, level 2 drops them and reads
        the files again; cached prefixes are lost. Raises EngineError while requests are running, and on a CPU."""
        for state in self.health():
            await self._ready()[0].call(state.engine, "sleep", timeout_s=REST_S, level=level)

    async def wake(self) -> None:
        """Ends a sleep before the next request would."""
        for state in self.health():
            await self._ready()[0].call(state.engine, "wake", timeout_s=REST_S)

    async def resting(self) -> list[dict[str, Any]]:
        """Sleep state of each engine: `engine`, `state` (awake, falling, asleep, waking), `sleep_level` and `pause` ("" for
        none)."""
        found = [(state.engine, await self.stats(state.engine)) for state in self.health()]
        return [{"engine": engine, **{name: stats[name] for name in RESTING}} for engine, stats in found]

    async def pause(self, mode: str = "wait", timeout_s: float = REST_S) -> None:
        """Returns once no engine steps. Running requests are ended ("abort"), finish first ("wait") or stay in place ("keep");
        new requests wait for `resume`. Raises EngineError for another mode, or when another pause or a resume intervenes, and
        TimeoutError."""
        await self._ready()[0].direct(pause_mode(mode), timeout_s)

    async def resume(self, timeout_s: float = REST_S) -> None:
        """Ends a pause."""
        await self._ready()[0].direct("", timeout_s)

    def _ready(self) -> tuple[EngineClient, TextSide, InFlight]:
        if self._client is None or self._text is None or self._in_flight is None:
            raise RuntimeError("not started, or closed")
        return self._client, self._text, self._in_flight


class Session:
    """The blocking twin: prompts in, answers out, in the same order. Starts on construction; close it, or use `with`.

    May be used from any thread, one call at a time.
    """

    def __init__(self, session: AsyncSession) -> None:
        self._session = session
        self._loop = LoopThread("trireme")
        try:
            self._loop.wait(session.start())
        except BaseException:
            self._loop.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """The resolved settings."""
        return self._session.config

    @property
    def decisions(self) -> list[Decision]:
        """What was resolved, and why."""
        return self._session.decisions

    @property
    def startup(self) -> dict[str, float]:
        """Seconds of each part of the start, from the construction of this object until it could answer."""
        return self._session.startup

    @overload
    def generate(  # type: ignore[overload-overlap]  # a str is a Sequence[str]; the first overload wins
        self,
        prompts: str,
        params: SamplingParams | None = None,
        *,
        salt: str | None = None,
        progress: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def generate(
        self,
        prompts: Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]: ...

    def generate(
        self,
        prompts: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str | None = None,
        progress: bool | None = None,
    ) -> Any:
        """One RequestOutput for a text, or a list of them for a list of texts or token id lists.

        All prompts are validated before the first is sent. `params` may be one for all or one per prompt. Shows a progress bar on
        a terminal. The first error ends the whole call and aborts the rest.
        """
        if isinstance(prompts, str):
            return self._run_all([PromptSource.raw(prompts)], params, salt, progress)[0]
        each = enumerate(series("prompts", prompts, "a text, a list of texts or a list of lists of token ids"))
        sources = [PromptSource.raw(prompt, param=f"prompts[{i}]") for i, prompt in each]
        return self._run_all(sources, params, salt, progress)

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | None = None,
        *,
        salt: str | None = None,
        progress: bool | None = None,
    ) -> RequestOutput: ...

    @overload
    def chat(
        self,
        messages: Sequence[Messages],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str | None = None,
        progress: bool | None = None,
    ) -> list[RequestOutput]: ...

    def chat(
        self,
        messages: Any,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        salt: str | None = None,
        progress: bool | None = None,
    ) -> Any:
        """The answer to one conversation (a list of messages), or the answers to a list of conversations."""
        messages = series("messages", messages, "a list of messages, or a list of such lists")
        many = not (messages and isinstance(messages[0], Mapping))
        sources = [PromptSource.conversation(conversation) for conversation in (messages if many else [messages])]
        outputs = self._run_all(sources, params, salt, progress)
        return outputs if many else outputs[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> Iterator[OutputDelta]:
        """Token by token. Leaving the loop early, also with Ctrl-C, aborts the request."""
        return self._loop.iterate(self._session.stream(prompt, params, salt=salt))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> Iterator[OutputDelta]:
        """The answer to a conversation, token by token."""
        return self._loop.iterate(self._session.stream_chat(messages, params, salt=salt))

    def health(self) -> list[EngineState]:
        """State of each engine."""

        async def states() -> list[EngineState]:
            return self._session.health()

        return self._loop.wait(states())

    def stats(self, engine: int = 0) -> dict[str, Any]:
        """Counters and load of one engine."""
        return self._loop.wait(self._session.stats(engine))

    def sleep(self, level: int = 1) -> None:
        """AsyncSession.sleep: releases GPU memory until there is work again."""
        self._loop.wait(self._session.sleep(level))

    def wake(self) -> None:
        """Ends a sleep before the next request would."""
        self._loop.wait(self._session.wake())

    def resting(self) -> list[dict[str, Any]]:
        """AsyncSession.resting: sleep state and pause of each engine."""
        return self._loop.wait(self._session.resting())

    def pause(self, mode: str = "wait", timeout_s: float = REST_S) -> None:
        """AsyncSession.pause: returns once no engine steps."""
        self._loop.wait(self._session.pause(mode, timeout_s))

    def resume(self, timeout_s: float = REST_S) -> None:
        """Ends a pause."""
        self._loop.wait(self._session.resume(timeout_s))

    def close(self) -> None:
        """Aborts running requests and releases the engines. May be called twice."""
        if self._loop.is_running:
            self._loop.wait(self._session.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run_all(
        self,
        sources: list[PromptSource],
        params: SamplingParams | Sequence[SamplingParams] | None,
        salt: str | None,
        progress: bool | None,
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or SamplingParams()] * len(sources)
        params = series("params", params, "SamplingParams, or a list of them")
        if len(params) != len(sources):
            raise ValueError(f"{len(sources)} prompts but {len(params)} params")
        session = self._session
        requests = [session.prepare(source, each, salt) for source, each in zip(sources, params, strict=True)]
        view = ProgressView(progress)
        try:
            return self._loop.wait(_all_in_order(session, requests, view))
        finally:
            view.close()


async def _all_in_order(session: AsyncSession, requests: list[BatchRequest], view: ProgressView) -> list[RequestOutput]:
    tasks = [asyncio.create_task(session.run(request)) for request in requests]
    try:
        for num_done, task in enumerate(asyncio.as_completed(tasks), 1):
            await task
            view.on_progress(Progress("trireme", "requests", num_done, len(tasks)))
    except BaseException:
        for running in tasks:
            running.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [task.result() for task in tasks]
