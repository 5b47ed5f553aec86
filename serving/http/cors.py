"""Which web pages may use this server from a browser: the origins of --cors-origins, and the headers that tell browsers so. Pure.

Called by serving/http/middleware.py. A browser asks first (a preflight, without a key), and shows an answer to a page only if
its headers allow the page's origin. https://fetch.spec.whatwg.org/#http-cors-protocol
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from trireme.errors import ConfigError

Headers = list[tuple[bytes, bytes]]

ANY = "*"
MAX_AGE_S = 600  # that a browser may remember a preflight; more is cut to as much by some
MAX_ASKED_BYTES = 2048
METHODS = b"GET, HEAD, POST, OPTIONS"
# Of our answers; a page sees few others.
EXPOSED = (
    "x-request-id",
    "x-ignored-fields",
    "retry-after",
    "x-should-retry",
    "x-ratelimit-limit-requests",
    "x-ratelimit-remaining-requests",
    "x-ratelimit-limit-tokens",
    "x-ratelimit-remaining-tokens",
)

_ORIGIN = re.compile(r"(?P<scheme>[a-z][a-z0-9+.-]*)://(?P<host>\[[0-9a-f:.]+\]|[^/?#@:\[\]\s,*]+)(?P<port>:\d{1,5})?")
_USUAL_PORTS = {"http": ":80", "https": ":443"}
_NAMES = re.compile(rb"[A-Za-z0-9!#$%&'*+.^_`|~-]+(?:[ \t]*,[ \t]*[A-Za-z0-9!#$%&'*+.^_`|~-]+)*")


class AllowedOrigins:
    """The origins that may use the server. Raises ConfigError for what is no origin.

    An entry is `scheme://host[:port]`, `null` (pages from files) or `*` (all pages).
    """

    def __init__(self, origins: Sequence[str] = ()) -> None:
        self.allows_all = ANY in origins
        self._origins = frozenset(_checked(origin) for origin in origins if origin != ANY)

    def __bool__(self) -> bool:
        return self.allows_all or bool(self._origins)

    def is_allowed(self, origin: str) -> bool:
        """Whether a page from `origin`, as its Origin header has it, may use the server."""
        return self.allows_all or _plain(origin) in self._origins

    def answer_headers(self, origin: str | None) -> Headers:
        """For every answer; `origin` is None where the request has none."""
        if not self:
            return []
        found: Headers = [] if self.allows_all else [(b"vary", b"Origin")]
        if origin is not None and self.is_allowed(origin):
            found += [self._allow(origin), (b"access-control-expose-headers", ", ".join(EXPOSED).encode())]
        return found

    def preflight_headers(self, asked: Mapping[bytes, bytes]) -> Headers | None:
        """The answer to an OPTIONS request with these headers, if it is a preflight from an allowed origin."""
        origin = asked.get(b"origin", b"").decode("latin-1")
        if not origin or b"access-control-request-method" not in asked or not self.is_allowed(origin):
            return None
        found = [
            self._allow(origin),
            (b"access-control-allow-methods", METHODS),
            (b"access-control-max-age", b"%d" % MAX_AGE_S),
            (b"vary", b"Origin, Access-Control-Request-Headers, Access-Control-Request-Private-Network"),
        ]
        wanted = asked.get(b"access-control-request-headers", b"")
        if wanted and len(wanted) <= MAX_ASKED_BYTES and _NAMES.fullmatch(wanted):
            found.append((b"access-control-allow-headers", wanted))
        if asked.get(b"access-control-request-private-network") == b"true":
            found.append((b"access-control-allow-private-network", b"true"))
        return found

    def _allow(self, origin: str) -> tuple[bytes, bytes]:
        return b"access-control-allow-origin", ANY.encode() if self.allows_all else origin.encode("latin-1")


def _plain(origin: str) -> str:
    """As browsers write it: lower case, without the usual port of its scheme."""
    found = _ORIGIN.fullmatch(origin.lower())
    if found is None or found["port"] != _USUAL_PORTS.get(found["scheme"]):
        return origin.lower()
    return f"{found['scheme']}://{found['host']}"


def _checked(origin: str) -> str:
    plain = _plain(origin.removesuffix("/"))
    if plain != "null" and not _ORIGIN.fullmatch(plain):
        raise ConfigError(
            f"--cors-origins holds {origin[:100]!r}; an origin is scheme://host or scheme://host:port",
            hint="--cors-origins https://app.example,http://localhost:3000, or * for all pages",
        )
    return plain
