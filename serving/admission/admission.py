"""Admission: who sent a request, the quota and priority of that caller, and whether there is room for the request.

Made and used by serving/front.py; serving/api/answer.py charges tokens. A caller over its quota gets a 429, an overloaded server
answers 503, both with Retry-After.
"""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, NamedTuple, Protocol

import msgspec
from msgspec import Meta
from starlette.types import Scope

from trireme.config import ServingConfig
from trireme.errors import ConfigError, OverloadedError, RequestError
from trireme.keys import check_keys
from trireme.serving.admission.concurrency import AdaptiveLimit, Cell
from trireme.serving.admission.quota import Account, Accounts, Quotas, Rates
from trireme.serving.engines.replay import RequestLimits
from trireme.targets import OFF, parse_target, tier_targets
from trireme.yaml_text import read_yaml

CLIENT_BYTES = 16
TIERS = {"priority": -1, "flex": 1}  # OpenAI's service_tier; the others are 0
FLEX_SHARE = 0.5  # of the room is for requests that can wait (a priority above 0)
MAX_TIMEOUT_S = 86400.0


class Grant(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One entry of the file behind --quotas. `priority` is the most urgent one that its requests may have."""

    key: Annotated[str, Meta(min_length=1, max_length=1024)]
    name: str = ""
    requests_per_minute: Annotated[int, Meta(ge=0, le=10**9)] = 0
    tokens_per_minute: Annotated[int, Meta(ge=0, le=10**12)] = 0
    priority: Annotated[int, Meta(ge=-1000, le=1000)] = 0

    @property
    def rates(self) -> Rates:
        return Rates(self.requests_per_minute, self.tokens_per_minute)


class QuotaFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    clients: Annotated[list[Grant], Meta(max_length=100_000)] = []


def read_grants(path: str | None) -> list[Grant]:
    """Raises ConfigError that names the place in the file and shows no key."""
    if path is None:
        return []
    try:
        grants = msgspec.convert(read_yaml(Path(path)) or {}, QuotaFile, strict=False).clients
    except msgspec.ValidationError as error:
        raise ConfigError(f"--quotas {path}: {error}") from error
    places: dict[str, int] = {}
    for i, grant in enumerate(grants):
        check_keys(f"--quotas {path}: clients[{i}]", [grant.key])
        if (first := places.setdefault(grant.key, i)) != i:
            raise ConfigError(f"--quotas {path}: clients[{first}] and clients[{i}] have the same key")
    return grants


class Caller(NamedTuple):
    """Who sent a request. `key` is a digest; `least_priority` None: any is allowed; `scope`: see RequestLimits."""

    key: bytes
    quota: Account | None
    least_priority: int | None
    scope: bytes = b""


class AdmissionFields(Protocol):
    """The fields of a body that concern the door."""

    @property
    def user(self) -> str | None: ...

    @property
    def priority(self) -> int | None: ...

    @property
    def service_tier(self) -> str | None: ...

    @property
    def timeout(self) -> float | None: ...

    @property
    def queue_timeout(self) -> float | None: ...


class Admission:
    """`accounts` and `cell` are those that this front end shares with others; without, it has its own."""

    def __init__(
        self,
        config: ServingConfig,
        *,
        queue_s: float,
        itl_target: str = OFF,
        shares_prefixes: bool = False,
        accounts: Accounts | None = None,
        cell: Cell | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._queue_s = queue_s
        self._itl_targets = tier_targets(itl_target)
        self._shares_prefixes = shares_prefixes
        self._total_s = config.request_timeout
        self._default = Rates(config.requests_per_minute, config.tokens_per_minute)
        grants = read_grants(config.quotas)
        self.keys = (*config.api_key, *(grant.key for grant in grants))
        self._grants = {key_digest(grant.key.encode()): grant for grant in grants}
        self._bounds_priority = bool(grants)
        self.quotas = accounts or Quotas()
        self.limit = AdaptiveLimit(config.target_wait, cell)

    # ------------------------------------------------------------ who

    def caller(self, scope: Scope) -> Caller:
        """By the digest of the key that the gate let in; without keys, by the address."""
        presented: bytes = scope.get("state", {}).get("key") or b""
        key = presented or key_digest(str((scope.get("client") or ("",))[0]).encode())
        grant = self._grants.get(key)
        rates = grant.rates if grant is not None else self._default
        least = grant.priority if grant is not None else 0 if self._bounds_priority else None
        return Caller(key, self.quotas.of(key, rates), least, b"" if self._shares_prefixes else presented)

    def admit(self, caller: Caller) -> None:
        """Counts one request of a caller. Raises OverloadedError (429) over its quota."""
        if caller.quota is None:
            return
        if (refusal := caller.quota.admit(self._clock())) is not None:
            limit, wait_s = refusal
            raise OverloadedError(f"your limit is reached: {limit}", retry_after_s=math.ceil(wait_s), own_quota=True)

    def charge(self, caller: Caller, num_tokens: int) -> None:
        if caller.quota is not None:
            caller.quota.take_tokens(self._clock(), num_tokens)

    def headers(self, caller: Caller) -> list[tuple[bytes, bytes]]:
        return caller.quota.headers(self._clock()) if caller.quota is not None else []

    # ------------------------------------------------------------ terms

    def terms(self, request: AdmissionFields, caller: Caller, scope: Scope) -> RequestLimits:
        """Raises RequestError naming the field."""
        priority = request.priority
        if priority is None:
            priority = TIERS.get(request.service_tier or "", 0)
        if caller.least_priority is not None:
            priority = max(priority, caller.least_priority)
        timeouts = [request.timeout, _header_seconds(scope, b"x-request-timeout")]
        return RequestLimits(
            _client_of(caller, request.user),
            priority,
            _shortest("queue_timeout", self._queue_s, request.queue_timeout),
            _shortest("timeout", self._total_s, *timeouts),
            caller.scope,
            self._itl_target(request.service_tier, scope),
        )

    def _itl_target(self, tier: str | None, scope: Scope) -> float:
        """Seconds between tokens that X-Itl-Target or the service tier asks for; 0: what the engines have."""
        for name, value in scope["headers"]:
            if name == b"x-itl-target":
                try:
                    return parse_target(str(value[:32], "latin-1"))
                except ValueError as error:
                    raise RequestError(f"X-Itl-Target: {error} (50ms)", param="x-itl-target") from error
        return self._itl_targets.get(tier or "", 0.0)

    # ------------------------------------------------------------ room

    def room(self, priority: int, least: int, most: int) -> int:
        """Choices that may be under way for a request of this priority to come in: urgent ones may use all there is, those that
        can wait only a part."""
        if priority < 0:
            return most
        limit = self.limit.limit(least, most)
        return limit if priority == 0 else max(1, int(limit * FLEX_SHARE))

    def waited(self, wait_s: float, num_rows: int) -> None:
        """A choice has left the queue of its engine."""
        self.limit.waited(wait_s, num_rows, self._clock())


def key_digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _client_of(caller: Caller, user: str | None) -> bytes:
    """Whom a request is for, as engines may know it: the key, and the user of that key."""
    name = (user or "").encode(errors="surrogatepass")
    return hashlib.blake2b(name, key=caller.key[:64], digest_size=CLIENT_BYTES).digest()


def _header_seconds(scope: Scope, wanted: bytes) -> float | None:
    for name, value in scope["headers"]:
        if name == wanted:
            try:
                return float(value) if len(value) <= 32 else math.nan
            except ValueError:
                return math.nan
    return None


def _shortest(name: str, limit_s: float, *asked: Any) -> float:
    """The server's limit, or what the caller asks for if that is shorter. 0: none."""
    found = limit_s
    for value in asked:
        if value is None:
            continue
        if not math.isfinite(value) or not 0 < value <= MAX_TIMEOUT_S:
            raise RequestError(
                f"{name} must be a number of seconds above 0 and at most {MAX_TIMEOUT_S:.0f}", param=name
            )
        found = min(found or value, float(value))
    return found
