"""`LLM` and `AsyncLLM`: the engine from Python, without HTTP. The same engines, scheduler and text side as the server's.

from trireme import LLM, SamplingParams
with LLM("smollm2") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeAlias, overload

import numpy as np

from launch.batch import InFlight, PromptSource, Request, TextSide, run_request, stream_request
from launch.blocking import LoopThread
from launch.deployment import Deployment, make_deployment
from launch.view import ProgressView
from serving.client import EngineClient
from transport.messages import Progress
from trireme.config import Decision, EngineConfig
from trireme.errors import ConfigError
from trireme.outputs import OutputDelta, RequestOutput
from trireme.params import SamplingParams
from trireme.resolve import Prepared, prepare
from trireme.settings import load

Prompt: TypeAlias = "str | Sequence[int] | np.ndarray"
"""Text, or token ids."""
Messages: TypeAlias = "Sequence[Mapping[str, Any]]"

CONNECT_TIMEOUT_S = 30.0


class AsyncLLM:
    """An engine for one asyncio loop. `async with AsyncLLM("smollm2", tp=2) as llm: ...`

    Keyword arguments are the settings of `trireme serve --help all`, spelled with underscores; `config` is a YAML file of
    them. A whole EngineConfig may stand in place of all these. Raises ConfigError and ModelError when made, EngineError
    and its kin from requests.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        config: str | Path | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        if not isinstance(model, EngineConfig):
            model = load(settings if model is None else {"model": str(model), **settings}, file=config).config
        elif settings or config is not None:
            raise ConfigError("an EngineConfig is complete: no further settings can be given beside it")
        self._prepared: Prepared = prepare(model)
        self._view = ProgressView(progress)
        self._deployment: Deployment | None = None
        self._client: EngineClient | None = None
        self._text: TextSide | None = None
        self._in_flight: InFlight | None = None

    @property
    def config(self) -> EngineConfig:
        """The resolved settings."""
        return self._prepared.config

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, and why."""
        return self._prepared.decisions

    @property
    def vocab_size(self) -> int:
        """Number of token ids; known once started."""
        assert self._client is not None
        assert self._client.facts is not None
        return self._client.facts.vocab_size

    async def start(self) -> None:
        """Loads the model and waits until it can answer."""
        deployment = self._deployment = make_deployment(self.config, self._view.on_progress)
        try:
            text = TextSide.load(self.config, self._prepared.model)
            await asyncio.to_thread(deployment.start)
            client = self._client = deployment.client()
            client.start()
            await client.wait_up(CONNECT_TIMEOUT_S)
        except BaseException:
            await self.close()
            raise
        finally:
            self._view.close()
        facts = client.facts
        assert facts is not None
        text.set_facts(facts)
        self._text = text
        self._in_flight = InFlight.for_engines(facts, self.config.parallel.dp)

    async def close(self) -> None:
        """Aborts what runs and ends the engines."""
        if self._client is not None:
            self._client.close()
            self._client = None
        if self._deployment is not None:
            await asyncio.to_thread(self._deployment.close)
            self._deployment = None

    async def __aenter__(self) -> AsyncLLM:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    # ------------------------------------------------------------ requests

    async def generate(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> RequestOutput:
        """Everything at once. Cancelling the task aborts the request."""
        return await self._run(PromptSource.raw(prompt), params, salt)

    async def chat(
        self, messages: Messages, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> RequestOutput:
        """The answer to a conversation, through the model's chat template."""
        return await self._run(PromptSource.talk(messages), params, salt)

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """Token by token. Leaving the loop early (with aclosing) aborts the request."""
        return self._stream(PromptSource.raw(prompt), params, salt)

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> AsyncGenerator[OutputDelta, None]:
        """The answer to a conversation, token by token."""
        return self._stream(PromptSource.talk(messages), params, salt)

    def prepare(self, source: PromptSource, params: SamplingParams | None, salt: str | None = None) -> Request:
        """Tokenizes and checks; raises RequestError before anything is sent."""
        if self._text is None:
            raise RuntimeError("start() has not been awaited, or the engine was closed")
        return self._text.request(source, params or SamplingParams(), salt)

    async def run(self, request: Request) -> RequestOutput:
        """A prepared request, as soon as the engines have room for it."""
        assert self._client is not None
        assert self._text is not None
        assert self._in_flight is not None
        async with self._in_flight.room_for(request):
            return await run_request(self._client, self._text, request)

    async def _run(self, source: PromptSource, params: SamplingParams | None, salt: str | None) -> RequestOutput:
        return await self.run(self.prepare(source, params, salt))

    async def _stream(
        self, source: PromptSource, params: SamplingParams | None, salt: str | None
    ) -> AsyncGenerator[OutputDelta, None]:
        request = self.prepare(source, params, salt)
        assert self._client is not None
        assert self._text is not None
        assert self._in_flight is not None
        async with (
            self._in_flight.room_for(request),
            aclosing(stream_request(self._client, self._text, request)) as deltas,
        ):
            async for delta in deltas:
                yield delta


class LLM:
    """The blocking twin of AsyncLLM, for scripts and notebooks: prompts in, answers out, in the same order.

    Starts when made. Use as a context manager, or call `close`. May be used from any thread, one call at a time.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        config: str | Path | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        self._llm = AsyncLLM(model, config=config, progress=progress, **settings)
        self._loop = LoopThread("llm")
        try:
            self._loop.wait(self._llm.start())
        except BaseException:
            self._loop.close()
            raise

    @property
    def config(self) -> EngineConfig:
        """The resolved settings."""
        return self._llm.config

    @property
    def decisions(self) -> list[Decision]:
        """What was decided, and why."""
        return self._llm.decisions

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
        """One RequestOutput for a text, a list of them for a list of texts or of token id lists.

        All prompts are checked before the first is sent. `params` may be one for all or one per prompt. Shows a bar on a
        terminal. The first error ends the whole call and aborts the rest.
        """
        many = not isinstance(prompts, str)
        sources = [PromptSource.raw(prompt) for prompt in (prompts if many else [prompts])]
        outputs = self._run_all(sources, params, salt, progress)
        return outputs if many else outputs[0]

    @overload
    def chat(
        self,
        messages: Messages,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
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
        """The answer to one conversation (a list of messages), or answers to a list of conversations."""
        many = not (messages and isinstance(messages[0], Mapping))
        sources = [PromptSource.talk(talk) for talk in (messages if many else [messages])]
        outputs = self._run_all(sources, params, salt, progress)
        return outputs if many else outputs[0]

    def stream(
        self, prompt: Prompt, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> Iterator[OutputDelta]:
        """Token by token. Leaving the loop early, also with Ctrl-C, aborts the request."""
        return self._loop.iterate(self._llm.stream(prompt, params, salt=salt))

    def stream_chat(
        self, messages: Messages, params: SamplingParams | None = None, *, salt: str | None = None
    ) -> Iterator[OutputDelta]:
        """The answer to a conversation, token by token."""
        return self._loop.iterate(self._llm.stream_chat(messages, params, salt=salt))

    def close(self) -> None:
        """Ends the engines. May be called twice."""
        if self._loop.is_running:
            self._loop.wait(self._llm.close())
            self._loop.close()

    def __enter__(self) -> LLM:
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
        if len(params) != len(sources):
            raise ValueError(f"{len(sources)} prompts but {len(params)} params")
        view = ProgressView(progress)
        requests = [self._llm.prepare(source, each, salt) for source, each in zip(sources, params, strict=True)]
        try:
            return self._loop.wait(_all_in_order(self._llm, requests, view))
        finally:
            view.close()


async def _all_in_order(llm: AsyncLLM, requests: list[Request], view: ProgressView) -> list[RequestOutput]:
    tasks = [asyncio.create_task(llm.run(request)) for request in requests]
    try:
        for num_done, task in enumerate(asyncio.as_completed(tasks), 1):
            await task
            view.on_progress(Progress("llm", "requests", num_done, len(tasks)))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise
    return [task.result() for task in tasks]
