"""`Hosts` and `AsyncHosts`: several servers behind one client, over their HTTP ports, with keep-alive connections.

Works with any server of the OpenAI API. Requests and answers are the API's own JSON. Server selection, retries and circuit
breaking are in transport/targets.py; a stream may move to another server before its first event, not after.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from typing import Any, Self

import httpx2
import msgspec

from trireme.launch.api.blocking import LoopThread
from trireme.launch.api.http import MAX_EVENT, endpoint, from_envelope, parsed
from trireme.transport.resilience import State
from trireme.transport.targets import Patience, TargetBusy, TargetFailed, Targets

CONNECT_S = 5.0
ANSWER_S = 600.0
SILENCE_S = 45.0  # between events: servers send pings more often
CONNECTIONS = 100  # kept alive, all servers together
MAX_ANSWER = 256 << 20
BUSY, FAILED = (429, 503), (500, 502, 504)


class AsyncHosts:
    """`async with AsyncHosts(["http://a:8000", "http://b:8000"], api_key=...) as hosts: await hosts.chat([...])`.

    `answer_s` is the maximum wait for a whole answer, `silence_s` that for the next event of a stream: a server silent for
    longer has failed.
    """

    def __init__(
        self,
        urls: Sequence[str],
        *,
        api_key: str = "",
        patience: Patience = Patience(),
        answer_s: float = ANSWER_S,
        silence_s: float = SILENCE_S,
    ) -> None:
        places = [endpoint(url, api_key).url for url in urls]
        self._targets = Targets(places, patience)
        self._answer_s, self._silence_s = answer_s, silence_s
        self._http = httpx2.AsyncClient(
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx2.Timeout(silence_s, connect=CONNECT_S),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=CONNECTIONS),
            trust_env=False,
        )

    async def post(self, path: str, body: Mapping[str, Any]) -> Any:
        """The whole answer to a JSON body. Raises ServerError (the request is wrong), TargetFailed, TargetBusy,
        OverloadedError."""

        async def attempt(url: str) -> Any:
            answer = await self._send(url + path, body, self._answer_s)
            try:
                return msgspec.json.decode(await _read(answer))
            except msgspec.DecodeError as error:
                raise TargetFailed(f"{url} answers with something other than JSON") from error
            finally:
                await answer.aclose()

        return await self._targets.call(attempt)

    async def stream(self, path: str, body: Mapping[str, Any]) -> AsyncGenerator[Any, None]:
        """Events until the end. Closing the generator cancels the request at its server."""

        async def attempt(url: str) -> tuple[httpx2.Response, AsyncGenerator[Any, None], Any]:
            answer = await self._send(url + path, {**body, "stream": True}, self._silence_s)
            events = _events(answer)
            try:
                return answer, events, await anext(events, None)
            except BaseException:
                await answer.aclose()
                raise

        answer, events, event = await self._targets.call(attempt)
        try:
            while event is not None:
                yield event
                event = await anext(events, None)
        finally:
            await events.aclose()
            await answer.aclose()

    async def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        return await self.post("/v1/chat/completions", {"messages": list(messages), **fields})

    async def complete(self, prompt: str | Sequence[int], **fields: Any) -> Any:
        return await self.post("/v1/completions", {"prompt": prompt, **fields})

    def states(self) -> list[tuple[str, State, int]]:
        """Each server, its breaker state, and its number of open requests."""
        return self._targets.states()

    async def _send(self, url: str, body: Mapping[str, Any], silence_s: float) -> httpx2.Response:
        request = self._http.build_request(
            "POST",
            url,
            content=msgspec.json.encode(body),
            headers={"content-type": "application/json"},
            timeout=httpx2.Timeout(silence_s, connect=CONNECT_S),
        )
        try:
            answer = await self._http.send(request, stream=True)
        except httpx2.HTTPError as error:
            raise TargetFailed(f"{url}: {type(error).__name__}: {error}") from error
        if answer.status_code == 200:
            return answer
        try:
            raise _refusal(answer, await _read(answer))
        finally:
            await answer.aclose()

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


async def _read(answer: httpx2.Response) -> bytes:
    pieces, size = [], 0
    try:
        async for piece in answer.aiter_bytes():
            pieces.append(piece)
            if (size := size + len(piece)) > MAX_ANSWER:
                raise TargetFailed(f"{answer.url} sends more than {MAX_ANSWER} bytes")
        return b"".join(pieces)
    except httpx2.HTTPError as error:
        raise TargetFailed(f"{answer.url} broke off: {type(error).__name__}: {error}") from error


async def _events(answer: httpx2.Response) -> AsyncGenerator[Any, None]:
    """Parsed events. Raises ServerError for an error event, TargetFailed when the stream breaks off."""
    try:
        async for line in _lines(answer):
            if line == b"data: [DONE]":
                return
            if line.startswith(b"data:"):
                event = msgspec.json.decode(line[5:])
                if isinstance(event, dict) and event.get("error"):
                    raise from_envelope(event, answer.status_code)
                yield event
    except (httpx2.HTTPError, msgspec.DecodeError) as error:
        raise TargetFailed(f"{answer.url} broke off: {type(error).__name__}: {error}") from error
    raise TargetFailed(f"{answer.url} closed the stream before its end")


async def _lines(answer: httpx2.Response) -> AsyncGenerator[bytes, None]:
    rest = b""
    async for piece in answer.aiter_bytes():
        *lines, rest = (rest + piece).split(b"\n")
        if len(rest) > MAX_EVENT:
            raise TargetFailed(f"{answer.url} sends an event of more than {MAX_EVENT} bytes")
        for line in lines:
            yield line.rstrip(b"\r")


def _refusal(answer: httpx2.Response, body: bytes) -> Exception:
    status = answer.status_code
    refusal = from_envelope(parsed(body, strict=False), status)
    if status in BUSY:
        wait = answer.headers.get("retry-after", "1")
        return TargetBusy(
            f"{answer.url} is busy: {refusal.message:.500}", wait_s=float(wait) if wait.isdigit() else 1.0
        )
    if status in FAILED and answer.headers.get("x-should-retry") != "false":
        return TargetFailed(f"{answer.url}: {refusal.message:.500}")
    return refusal


class Hosts:
    """The blocking twin of AsyncHosts. May be used from any thread, one call at a time."""

    def __init__(self, urls: Sequence[str], **settings: Any) -> None:
        self._loop = LoopThread("trireme-hosts")

        async def make() -> AsyncHosts:
            return AsyncHosts(urls, **settings)

        try:
            self._hosts = self._loop.wait(make())
        except BaseException:
            self._loop.close()
            raise

    def post(self, path: str, body: Mapping[str, Any]) -> Any:
        return self._loop.wait(self._hosts.post(path, body))

    def chat(self, messages: Sequence[Mapping[str, Any]], **fields: Any) -> Any:
        return self._loop.wait(self._hosts.chat(messages, **fields))

    def complete(self, prompt: str | Sequence[int], **fields: Any) -> Any:
        return self._loop.wait(self._hosts.complete(prompt, **fields))

    def stream(self, path: str, body: Mapping[str, Any]) -> Iterator[Any]:
        return self._loop.iterate(self._hosts.stream(path, body))

    def close(self) -> None:
        """Closes all connections. May be called twice."""
        if self._loop.is_running:
            self._loop.wait(self._hosts.close())
            self._loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
