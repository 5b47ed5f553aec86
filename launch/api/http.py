"""A small HTTP/1.1 client for OpenAI-style servers: JSON answers and SSE streams, over asyncio, without third-party imports.

Used by chat, complete and the load benchmark. One connection per request, always closed afterwards, so that leaving early cancels
the request at the server.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import msgspec

from trireme.errors import ConfigError, TriremeError
from trireme.netloc import netloc

MAX_HEAD = 64 << 10
MAX_EVENT = 16 << 20


class ServerError(TriremeError):
    """The server refused or broke off; `status` is its HTTP status, 0 when it was unreachable."""

    def __init__(self, message: str, *, status: int = 0, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status


class Endpoint(NamedTuple):
    """Address of a server. `key` is sent as a bearer token."""

    host: str
    port: int
    tls: bool
    base: str
    key: str = ""

    @property
    def authority(self) -> str:
        """Host and port as in the Host header."""
        return netloc(self.host, self.port)

    @property
    def url(self) -> str:
        return f"{'https' if self.tls else 'http'}://{self.authority.replace('%', '%25')}{self.base}"


def endpoint(url: str, key: str = "") -> Endpoint:
    """From `http://host:port[/base]`, with an IPv6 address in brackets. Raises ConfigError."""
    try:
        parts = urlsplit(url if "://" in url else "http://" + url)
        port = parts.port
        host = (parts.hostname or "").encode("idna").decode()
    except ValueError as error:
        raise ConfigError(
            f"--url is no address: {error}", hint="--url http://127.0.0.1:8000 or --url http://[::1]:8000"
        ) from None
    if parts.username or parts.password:  # (credentials, which must not be shown)
        raise ConfigError("--url has a user name or a password in it, which is not sent", hint="--api-key-file FILE")
    if parts.scheme not in ("http", "https") or not host:
        raise ConfigError(f"--url is {url!r}; it must be like http://127.0.0.1:8000 or http://[::1]:8000")
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix("/v1")
    return Endpoint(unquote(host), port or (443 if tls else 80), tls, base, key)


async def get_json(to: Endpoint, path: str) -> Any:
    """The parsed answer of a GET. Raises ServerError."""
    return await _answered(to, "GET", path)


async def post_json(to: Endpoint, path: str) -> Any:
    """The parsed answer of a POST whose arguments are in `path`. Raises ServerError."""
    return await _answered(to, "POST", path)


async def _answered(to: Endpoint, method: str, path: str) -> Any:
    answer = await _Answer.open(to, method, path, b"")
    try:
        return parsed(await answer.body())
    finally:
        answer.close()


async def stream(to: Endpoint, path: str, body: dict[str, Any]) -> AsyncGenerator[Any, None]:
    """Parsed SSE events of a POST until [DONE]; closing the iterator closes the connection. Raises ServerError, also for an error
    event in the stream."""
    answer = await _Answer.open(to, "POST", path, msgspec.json.encode(body))
    try:
        async for event in answer.events():
            if event == b"[DONE]":
                return
            value = parsed(event)
            if not isinstance(value, dict):
                raise ServerError(f"an event of the server's stream is no JSON object: {event[:80]!r}")
            if value.get("error"):
                raise from_envelope(value, answer.status)
            yield value
        raise ServerError("the server closed the stream before its end")
    finally:
        answer.close()


class _Answer:
    """An answer whose header has been read."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, status: int, head: bytes) -> None:
        self.reader, self.writer, self.status = reader, writer, status
        self.is_chunked = b"transfer-encoding: chunked" in head.lower()
        self.length = next(
            (int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")), None
        )

    @classmethod
    async def open(cls, to: Endpoint, method: str, path: str, body: bytes) -> _Answer:
        """Sends the request and reads the header; a status other than 200 is raised with the server's own message."""
        try:
            reader, writer = await asyncio.open_connection(
                to.host, to.port, ssl=ssl.create_default_context() if to.tls else None, limit=MAX_EVENT
            )
        except OSError as error:
            raise ServerError(f"no server answers at {to.url}: {error.strerror or error}") from error
        try:
            writer.write(_request(to, method, path, body))
            head = await reader.readuntil(b"\r\n\r\n")
            answer = cls(reader, writer, _status_of(head), head)
            if answer.status != 200:
                raise from_envelope(parsed(await answer.body(), strict=False), answer.status)
            return answer
        except BaseException as error:
            writer.close()
            if isinstance(error, asyncio.IncompleteReadError | ConnectionError):
                raise ServerError(f"{to.url} closed the connection without an answer") from error
            if isinstance(error, asyncio.LimitOverrunError | ValueError):
                raise ServerError(f"what answers at {to.url} does not speak HTTP: {error}") from error
            raise

    async def body(self) -> bytes:
        """The complete body. Raises ServerError when the connection breaks off or the framing is invalid."""
        if self.is_chunked or self.length is None:
            return b"".join([piece async for piece in self._pieces()])
        try:
            return await self.reader.readexactly(self.length)
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ServerError("the server broke the connection off in the middle of its answer") from error
        except ValueError as error:
            raise ServerError(f"the server's answer is broken: {error}") from error

    async def events(self) -> AsyncIterator[bytes]:
        """The data of each SSE event."""
        held = b""
        async for piece in self._pieces():
            held += piece
            *lines, held = held.split(b"\n")
            for line in lines:
                if line.startswith(b"data:"):
                    yield line[5:].strip()

    async def _pieces(self) -> AsyncIterator[bytes]:
        try:
            while self.is_chunked:
                size = _chunk_size(await self.reader.readuntil(b"\r\n"))
                if size == 0:
                    return
                yield (await self.reader.readexactly(size + 2))[:-2]
            while piece := await self.reader.read(65536):
                yield piece
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise ServerError("the server broke the connection off in the middle of its answer") from error
        except (asyncio.LimitOverrunError, ValueError) as error:
            raise ServerError(f"the server's answer is broken: {error}") from error

    def close(self) -> None:
        self.writer.close()


def _status_of(head: bytes) -> int:
    """HTTP status of a header. Raises ValueError."""
    words = head.split(b" ", 2)
    if not head.startswith(b"HTTP/") or len(words) < 2:
        raise ValueError(f"it begins with {head[:40]!r}")
    return int(words[1])


def _chunk_size(line: bytes) -> int:
    """Size of an HTTP chunk, in bytes. Raises ValueError."""
    size = int(line.split(b";")[0], 16)
    if size < 0:
        raise ValueError(f"a piece of {size} bytes")
    return size


async def first_model(to: Endpoint) -> str:
    """Name of the first model that an OpenAI-style server lists. Raises ServerError, also where there is none."""
    try:
        listed = msgspec.convert(await get_json(to, "/v1/models"), _Models)
    except msgspec.ValidationError as error:
        raise ServerError(f"what answers at {to.url} has no list of models: {error}") from error
    if not listed.data:
        raise ServerError(f"the server at {to.url} has no model")
    return listed.data[0].id


class _Model(msgspec.Struct):
    id: str


class _Models(msgspec.Struct):
    data: list[_Model]


def _request(to: Endpoint, method: str, path: str, body: bytes) -> bytes:
    lines = [f"{method} {to.base}{path} HTTP/1.1", f"Host: {to.authority}", "Connection: close"]
    lines += ["Content-Type: application/json", f"Content-Length: {len(body)}"] if body else []
    lines += [f"Authorization: Bearer {to.key}"] if to.key else []
    return "\r\n".join([*lines, "", ""]).encode() + body


def parsed(raw: bytes, *, strict: bool = True) -> Any:
    """A JSON body. Invalid JSON raises ServerError or, unless `strict`, is returned as text, at most 200 bytes."""
    try:
        return msgspec.json.decode(raw)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        if strict:
            raise ServerError(f"the server's answer is not JSON: {raw[:80]!r}") from error
        return raw[:200].decode(errors="replace")


def from_envelope(value: Any, status: int) -> ServerError:
    """The ServerError of an error body or event, whatever its shape."""
    error = value.get("error") if isinstance(value, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return ServerError(f"the server answered {status}: {message or value or 'nothing'}", status=status)
