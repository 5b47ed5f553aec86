"""The layers around the routes: authentication, request ids, and the answer to every error.

Outermost is the key: deny by default, public routes are listed one by one and compared with the path as it is routed. The
application inside may raise; whatever it raises becomes one error envelope here (or closes an answer that has begun).
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from trireme.errors import AuthError, DeadlineError, RequestError, TriremeError
from trireme.netloc import is_address, is_loopback, without_port
from trireme.serving.http.cors import METHODS, AllowedOrigins
from trireme.serving.http.errors import OPENAI_ERRORS, ErrorEnvelope, envelope_of, error_status, retry_after
from trireme.serving.http.origin import is_foreign

log = logging.getLogger(__name__)

PIECE_BYTES = 64 << 10  # of an answer, handed over at a time
PUBLIC = frozenset(("/health", "/live", "/ready", "/startup", "/version"))
_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")

Headers = list[tuple[bytes, bytes]]


class ForbiddenError(RequestError):
    status = 403
    code = "forbidden"


class ApiKeys:
    """API keys, kept as digests and compared in constant time."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys if key]  # (everybody has the empty one)

    def __bool__(self) -> bool:
        return bool(self._digests)

    def find(self, headers: Headers) -> bytes | None:
        """The digest of the known key that `Authorization: Bearer KEY` or `x-api-key: KEY` names, if it is one."""
        presented = b""
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                presented = value[7:].strip()
            elif name == b"x-api-key" and not presented:
                presented = value.strip()
        digest = _digest(presented)
        found = False
        for known in self._digests:
            found |= hmac.compare_digest(known, digest)
        return digest if found else None


class Admin(NamedTuple):
    """Paths that change what the server does, and the keys that open these and all others; without keys they stay closed."""

    paths: Container[str]
    keys: ApiKeys


class Middleware:
    """The outermost ASGI application. Puts `request_id` into scope["state"] and on every answer. `origins` are those of web pages
    that may use the server."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        keys: Sequence[str] = (),
        host: str = "127.0.0.1",
        admin: Admin | None = None,
        origins: AllowedOrigins = AllowedOrigins(),
    ) -> None:
        self._app = app
        self._keys = ApiKeys(keys)
        self._admin = admin or Admin((), ApiKeys(()))
        self._origins = origins
        # A web page may point its own name at 127.0.0.1: without a key, a loopback server answers only to loopback names.
        self._checks_host = is_loopback(host) and not keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        request_id = _request_id(scope["headers"])
        scope.setdefault("state", {})["request_id"] = request_id
        headers = dict(scope["headers"])
        origin = headers[b"origin"].decode("latin-1") if b"origin" in headers else None
        marks = [(b"x-request-id", request_id.encode()), *self._origins.answer_headers(origin)]
        has_started = False

        async def send_marked(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [*message.get("headers", ()), *marks]
            await send(message)

        if scope["method"] == "OPTIONS" and (allowed := self._origins.preflight_headers(headers)) is not None:
            await send_options(send, METHODS, [*allowed, marks[0]])
            return
        try:
            if scope["path"] not in PUBLIC:
                self._check(scope)
            await self._app(scope, receive, send_marked)
        except Exception as error:  # the one place that answers for all routes
            if not isinstance(error, TriremeError):
                log.exception("a request failed. request_id=%s path=%s", request_id, scope["path"])
            if has_started:
                raise
            await send_error(send_marked, error, request_id, envelope_of(scope))

    def _check(self, scope: Scope) -> None:
        if scope["path"] in self._admin.paths:
            self._check_admin(scope)
        elif self._keys:
            by_admin = self._admin.keys.find(scope["headers"])
            scope["state"]["key"] = digest = self._keys.find(scope["headers"]) or by_admin
            if digest is None:
                raise AuthError("no valid API key: send it as 'Authorization: Bearer KEY'")
        if self._checks_host:
            self._check_hosts(scope["headers"])
        if not self._keys and is_foreign(scope["method"], scope["headers"], self._origins.is_allowed):
            raise ForbiddenError(
                "a web page of another origin sent this, and this server has no key that would tell who may use it",
                hint="start it with --api-key, or with --cors-origins",
            )

    def _check_hosts(self, headers: Headers) -> None:
        for host in (without_port(value.decode("latin-1")) for name, value in headers if name == b"host"):
            if host and not is_address(host) and not is_loopback(host):
                raise ForbiddenError(
                    "this server listens on loopback without a key and answers only to loopback names",
                    hint="start it with --api-key or another --host",
                )

    def _check_admin(self, scope: Scope) -> None:
        if not self._admin.keys:
            raise ForbiddenError(
                f"{scope['path']} changes what this server does, and needs a key that it was started without",
                hint="start it with --admin-key",
            )
        if self._admin.keys.find(scope["headers"]) is None:
            raise AuthError("no valid admin key: send it as 'Authorization: Bearer KEY'")


async def send_error(
    send: Send, error: BaseException, request_id: str, envelope: ErrorEnvelope = OPENAI_ERRORS
) -> None:
    """One error envelope with its status, Retry-After where it helps, and the `allow` that an error of the method has."""
    headers: Headers = []
    if (wait := retry_after(error)) is not None:
        headers.append((b"retry-after", str(max(1, round(wait))).encode()))
    if isinstance(error, AuthError):
        headers.append((b"www-authenticate", b"Bearer"))
    if isinstance(error, DeadlineError):
        headers.append((b"x-should-retry", b"false"))
    if allow := getattr(error, "allow", b""):
        headers.append((b"allow", allow))
    await send_body(send, error_status(error), envelope.body(error, request_id), headers)


async def send_options(send: Send, allow: bytes, headers: Iterable[tuple[bytes, bytes]] = ()) -> None:
    """The answer to an OPTIONS: the methods that a route takes."""
    await send({"type": "http.response.start", "status": 204, "headers": [(b"allow", allow), *headers]})
    await send({"type": "http.response.body", "body": b""})


async def send_body(
    send: Send, status: int, body: bytes, headers: Iterable[tuple[bytes, bytes]] = (), kind: bytes = b"application/json"
) -> None:
    """A whole answer, in pieces of PIECE_BYTES, so that the buffer of a slow connection stays small."""
    fixed = [(b"content-type", kind), (b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": [*fixed, *headers]})
    for start in range(0, max(1, len(body)), PIECE_BYTES):
        end = start + PIECE_BYTES
        await send({"type": "http.response.body", "body": body[start:end], "more_body": end < len(body)})
        if end < len(body):
            await asyncio.sleep(0)  # so that others get their turn, and a lost connection is noticed


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _request_id(headers: Headers) -> str:
    """The caller's X-Request-Id if it is short and plain, else a new one."""
    for name, value in headers:
        if name == b"x-request-id" and _REQUEST_ID.fullmatch(value):
            return value.decode()
    return uuid.uuid4().hex
