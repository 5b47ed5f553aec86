"""API keys: their allowed form, and the files they are read from. No message here shows a key.

Called by trireme/settings.py for keys from every source.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from trireme.errors import ConfigError

MAX_KEY = 1024  # characters
MAX_FILE_BYTES = 1 << 20


def check_keys(spelling: str, keys: Sequence[str]) -> None:
    """Raises ConfigError, naming only where the key was given, for a well-known placeholder key or one that no header can
    carry."""
    for i, key in enumerate(keys):
        which = f" number {i + 1}" if len(keys) > 1 else ""
        if not key:
            raise ConfigError(
                f"{spelling} has an empty key{which}, which everybody knows", hint="leave it out, or give it a value"
            )
        if len(key) > MAX_KEY:
            raise ConfigError(f"{spelling} has a key{which} of {len(key)} characters; the limit is {MAX_KEY}")
        if key != key.strip() or not key.isprintable():
            raise ConfigError(
                f"{spelling} has a key{which} with a space at its ends, or a line break or another control character in it: "
                "no client can send it"
            )


def read_keys(spelling: str, path: str) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines are skipped. Raises ConfigError for a file without a key."""
    try:
        with open(os.path.expanduser(path), "rb") as file:
            raw = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{spelling}: {error.strerror}"
        ) from None  # without the path: it may be the key itself, given by mistake
    if len(raw) > MAX_FILE_BYTES:
        raise ConfigError(f"{spelling} {path} has more than {MAX_FILE_BYTES} bytes, the limit for a file of keys")
    try:
        lines = [line.strip() for line in raw.decode().splitlines()]
    except UnicodeDecodeError as error:
        raise ConfigError(f"{spelling} {path}: byte {error.start} is not UTF-8") from None  # the cause holds the bytes
    keys = tuple(line for line in lines if line)
    if not keys:
        raise ConfigError(f"{spelling} {path} holds no key", hint="write one key a line into it")
    check_keys(f"{spelling} {path}", keys)
    return keys
