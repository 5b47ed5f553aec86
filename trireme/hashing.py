"""Content hashes of KV blocks: SHA-256 over canonical CBOR (RFC 8949, section 4.2.1).

Called by the engine's prefix cache and by frontends that route on prefixes: the same tokens give the same hash in every
process, on every machine, in every run. Never depends on Python's `hash`, on dict order or on the time.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

Cbor: TypeAlias = "None | bool | int | bytes | str | tuple[Cbor, ...] | list[Cbor] | dict[str, Cbor]"
"""Types that a key may contain. Floats are left out on purpose: they have no single canonical encoding."""

ROOT = hashlib.sha256(b"trireme kv block root, version 1").digest()
"""Parent of every first block."""

_NO_EXTRA = b"\x80"
_sha256 = hashlib.sha256  # looked up once: a block's hash takes less than a microsecond


def cbor(value: Cbor) -> bytes:
    """Canonical CBOR: shortest heads, definite lengths, map keys in the order of their encodings.

    Raises TypeError for a type outside `Cbor` and ValueError for an integer outside 64 bits.
    """
    if value is None:
        return b"\xf6"
    if value is True:
        return b"\xf5"
    if value is False:
        return b"\xf4"
    if isinstance(value, int):
        return _head(0, value) if value >= 0 else _head(1, -1 - value)
    if isinstance(value, bytes):
        return _head(2, len(value)) + value
    if isinstance(value, str):
        raw = value.encode()
        return _head(3, len(raw)) + raw
    if isinstance(value, list | tuple):
        return _head(4, len(value)) + b"".join(map(cbor, value))
    if isinstance(value, dict):
        pairs = sorted((cbor(key), cbor(item)) for key, item in value.items())
        return _head(5, len(pairs)) + b"".join(key + item for key, item in pairs)
    raise TypeError(f"{type(value).__name__} has no canonical form")


def block_hash(parent: bytes, tokens: np.ndarray | memoryview | bytes, extra: tuple[Cbor, ...] = ()) -> bytes:
    """Hash of one full block: SHA-256 over CBOR [parent, token ids as little-endian int32, extra].

    `tokens` is a contiguous int32 array (or its bytes). `extra` holds whatever else shapes the KV: the cache salt (first
    block only; the chain carries it on), an adapter, media hashes.
    """
    if type(tokens) is bytes and not extra:
        before, between = _heads(len(parent), len(tokens))
        return _sha256(before + parent + between + tokens + _NO_EXTRA).digest()
    raw = tokens.tobytes() if isinstance(tokens, np.ndarray) else bytes(tokens)
    tail = cbor(extra) if extra else _NO_EXTRA
    before, between = _heads(len(parent), len(raw))
    return _sha256(before + parent + between + raw + tail).digest()


def first_extra(salt: bytes) -> tuple[Cbor, ...]:
    """The `extra` of a prompt's first block under a cache salt."""
    return ("salt", salt) if salt else ()


def cache_salt(scope: bytes, salt: str | None) -> bytes:
    """The salt of a request: 32 bytes, or none. `scope` is a secret shared by those who may share prefixes (at most 64 bytes;
    empty: all callers without one), `salt` the request's own isolation key. Neither can be recovered from the result."""
    asked = salt.encode(errors="surrogatepass") if salt else b""
    if scope:
        return hashlib.blake2b(asked, key=scope, digest_size=32, person=b"kv prefix scope").digest()
    return _sha256(asked).digest() if asked else b""


def block_hashes(tokens: np.ndarray, block_size: int, *, salt: bytes = b"") -> list[bytes]:
    """Hashes of all full blocks of a prompt, in order."""
    ids = np.ascontiguousarray(tokens, dtype="<i4")
    raw = memoryview(ids.view(np.uint8).data)
    step = block_size * 4
    hashes: list[bytes] = []
    parent, extra = ROOT, first_extra(salt)
    for end in range(step, len(raw) + 1, step):
        parent = block_hash(parent, raw[end - step : end], extra)
        hashes.append(parent)
        extra = ()
    return hashes


# ---------------------------------------------------------------- keys: truncated hashes, for approximate lookups

KEY_BYTES = 8


def packed_keys(hashes: Iterable[bytes]) -> bytes:
    """The first 8 bytes of each hash."""
    return b"".join([content[:KEY_BYTES] for content in hashes])


def unpacked_keys(packed: bytes) -> NDArray[np.uint64]:
    """Keys as numbers, none of them 0."""
    keys: NDArray[np.uint64] = np.maximum(np.frombuffer(packed, "<u8"), np.uint64(1))
    return keys


def prompt_keys(tokens: np.ndarray, block_size: int, *, salt: bytes = b"", most: int = 1024) -> bytes:
    """Keys of the prompt blocks that could be cached (at least one token is always computed), at most `most`."""
    usable = min((len(tokens) - 1) // block_size, most) * block_size
    return packed_keys(block_hashes(tokens[:usable], block_size, salt=salt))


@lru_cache(maxsize=64)
def _heads(parent_size: int, token_size: int) -> tuple[bytes, bytes]:
    """CBOR heads before the parent and before the tokens of a block; cached, since engines ask for the same sizes every time."""
    return b"\x83" + _head(2, parent_size), _head(2, token_size)


def _head(major: int, number: int) -> bytes:
    """Head of a CBOR item in the shortest form that holds `number`."""
    kind = major << 5
    if number < 24:
        return bytes((kind | number,))
    for code, size in ((24, 1), (25, 2), (26, 4), (27, 8)):
        if number < 1 << (8 * size):
            return bytes((kind | code,)) + number.to_bytes(size, "big")
    raise ValueError(f"{number} does not fit 64 bits")
