"""Accounts of callers that all front ends share, so that a limit is one limit however many of them there are.

Used by serving/admission/admission.py. A caller's account (serving/admission/quota.py) is a record of a file: read, changed
and written back under its lock, a few microseconds each time. It is exact while that lock is to be had; where it is not (a
front end was stopped in those microseconds), front ends that count at the same moment may let in one request each that they
should not.

     set of a caller = digest mod NUM_SETS     [ record | record | ... ]     NUM_WAYS callers, the one used longest ago makes room
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from trireme.serving.admission.quota import NUM_SLOTS, Quota, Rates
from trireme.serving.admission.shared_file import SharedFile

NUM_SETS, NUM_WAYS = 2048, 8
_RECORD = struct.Struct(
    f"<32sddd q{NUM_SLOTS + 1}I"
)  # caller, used at, level of the bucket, filled at, newest slot, counts
_SIZE = _RECORD.size
_NOBODY = bytes(32)

Result = TypeVar("Result")


class SharedQuotas:
    """As serving.admission.quota.Quotas, in the file `path`. Times are readings of time.monotonic, which the processes of a
    host share."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError."""
        self._file = SharedFile(path)

    def of(self, caller: bytes, rates: Rates) -> SharedAccount | None:
        """None for a caller without limits."""
        return SharedAccount(self._file, hashlib.sha256(caller).digest(), rates) if any(rates) else None

    def close(self) -> None:
        self._file.close()


class SharedAccount:
    """The account of one caller."""

    def __init__(self, file: SharedFile, caller: bytes, rates: Rates) -> None:
        self._file = file
        self._caller = caller
        self._rates = rates
        self._at = int.from_bytes(caller[:8], "little") % NUM_SETS * NUM_WAYS * _SIZE

    def admit(self, now: float) -> tuple[str, float] | None:
        """See Quota.admit."""
        return self._with(now, lambda quota: quota.admit(now))

    def take_tokens(self, now: float, count: int) -> None:
        self._with(now, lambda quota: quota.take_tokens(now, count))

    def headers(self, now: float) -> list[tuple[bytes, bytes]]:
        return self._with(now, lambda quota: quota.headers(now))

    def _with(self, now: float, work: Callable[[Quota], Result]) -> Result:
        with self._file.locked(NUM_WAYS * _SIZE, self._at):
            records = list(_RECORD.iter_unpack(self._file.read(NUM_WAYS * _SIZE, self._at)))
            way = next((i for i, record in enumerate(records) if record[0] == self._caller), -1)
            quota = Quota(self._rates)
            if way >= 0:
                _, _, level, filled_at, newest, *counts = records[way]
                _restore(quota, level, filled_at, newest, counts)
            else:
                way = min(range(NUM_WAYS), key=lambda i: (records[i][0] != _NOBODY, records[i][1]))
            result = work(quota)
            self._file.write(_RECORD.pack(self._caller, now, *_state(quota)), self._at + way * _SIZE)
            return result


def _state(quota: Quota) -> tuple[float, ...]:
    level, filled_at = quota.tokens.state() if quota.tokens is not None else (0.0, 0.0)
    newest, counts = quota.requests.state() if quota.requests is not None else (0, [0] * (NUM_SLOTS + 1))
    return (level, filled_at, newest, *counts)


def _restore(quota: Quota, level: float, filled_at: float, newest: int, counts: list[int]) -> None:
    if quota.tokens is not None:
        quota.tokens.restore(level, filled_at)
    if quota.requests is not None:
        quota.requests.restore(newest, counts)
