"""Whether a request was sent by a web page of another site. Browsers say so themselves; other clients say nothing.

Used by serving/http/middleware.py. A page anywhere can make its visitor's browser send a POST to this machine, which computes
although the page may not read the answer. Sec-Fetch-Site (W3C Fetch Metadata) and Origin (RFC 6454) tell, and a page cannot
set either.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

_SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))  # they change nothing and compute nothing
_OWN_SITES = frozenset((b"same-origin", b"none"))  # none: the user's own doing


def is_foreign(
    method: str, headers: Iterable[tuple[bytes, bytes]], is_allowed: Callable[[str], bool] = lambda _: False
) -> bool:
    """True for a request that a page of another origin sent, unless that origin (`https://a.example`) `is_allowed`. Header names
    are lower case."""
    if method in _SAFE_METHODS:
        return False
    found: dict[bytes, list[bytes]] = {b"origin": [], b"sec-fetch-site": [], b"host": []}
    for name, value in headers:
        if name in found:
            found[name].append(value.strip().lower())
    origins = found[b"origin"]
    if origins and all(is_allowed(origin.decode("latin-1")) for origin in origins):
        return False
    if sites := found[b"sec-fetch-site"]:
        return not _OWN_SITES.issuperset(sites)
    return any(origin.partition(b"://")[2] not in found[b"host"] for origin in origins)
