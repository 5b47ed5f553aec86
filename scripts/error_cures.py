"""Cause and cure of each error code, for docs/errors.md. A code that is missing here fails `make docs` and a test."""

from __future__ import annotations

from typing import NamedTuple


class Cure(NamedTuple):
    """What went wrong, and what the reader of the error can do."""

    cause: str
    cure: str


CURES: dict[str, Cure] = {
    # the operator's
    "config_error": Cure(
        "a flag, environment name, YAML key or combination of them is impossible",
        "read the hint; `trireme plan MODEL` shows what fits",
    ),
    "model_error": Cure(
        "a model file is missing, broken or of an unsupported kind",
        "`trireme models inspect FILE`; [models.md](models.md) lists what is supported",
    ),
    # the caller's request
    "invalid_value": Cure(
        "a field of the request is wrong; `param` is its path",
        "change that field; the message has the value and the limit",
    ),
    "context_length_exceeded": Cure(
        "prompt and completion are longer than the model's context",
        "send a shorter prompt or `max_tokens`; raise `--max-len` if memory allows",
    ),
    "invalid_api_key": Cure(
        "no key, or one that `--api-key` and `--quotas` do not name", "send `Authorization: Bearer KEY`"
    ),
    "forbidden": Cure(
        "the route needs a key of `--admin-key`, or the Host or origin is not allowed",
        "use an admin key; name the server as it listens",
    ),
    "not_found": Cure(
        "no such route or model", "`GET /v1/models` lists the model; see [cli.md](cli.md) for `--served-name`"
    ),
    "model_not_found": Cure(
        "the request names another model than the server has", "`GET /v1/models` lists it; `--served-name` sets it"
    ),
    "method_not_allowed": Cure("the route exists with another HTTP method", "use one that the header `Allow` names"),
    "unsupported_media_type": Cure("the body is not JSON", "send `Content-Type: application/json`"),
    "timeout": Cure("the body did not arrive in time", "send the body at once; look at the network between"),
    "too_large": Cure("body or header over its limit", "send less, or raise `--body-limit`"),
    # load
    "rate_limit_exceeded": Cure(
        "the caller's own requests or tokens per minute are used up",
        "wait for `Retry-After`; the operator sets `--requests-per-minute`, `--tokens-per-minute`, `--quotas`",
    ),
    "overloaded": Cure(
        "the server is full: queue, open requests, bodies or connections",
        "wait for `Retry-After`; add engines (`--dp`) or raise `--max-waiting`",
    ),
    "latency_targets_missed": Cure(
        "prompts wait longer than `--ttft-target` although steps take longer than `--itl-target`",
        "wait for `Retry-After`; add engines (`--dp`), or loosen one of the targets",
    ),
    "deadline_exceeded": Cure(
        "not complete when `timeout`, `queue_timeout` or `--request-timeout` was over",
        "ask for less or allow more time; sending the same again meets the same limit",
    ),
    "slow_reader": Cure(
        "the client did not read its stream for 30 s or lagged `--stream-buffer` bytes behind",
        "read faster; raise `--stream-buffer`",
    ),
    # the server's
    "internal_error": Cure(
        "an error that the program did not foresee", "look for the traceback in the log and report it"
    ),
    "engine_error": Cure("an engine failed on this request", "send it again; the log of the engine says why"),
    "engine_dead": Cure(
        "the engine of this request died and `--migration-limit` or `--engine-wait` was used up",
        "wait for `Retry-After`; the supervisor starts the engine again",
    ),
    "request_quarantined": Cure(
        "two engines died while they ran this request", "do not send it again; report it with the log"
    ),
    "collective_error": Cure(
        "an exchange between workers failed or a rank did not come",
        "the engine restarts; check that all GPUs and ranks are alive",
    ),
    "worker_lost": Cure(
        "a worker died or was killed (signal, memory)",
        "the engine restarts; the log has the worker's traceback, `dmesg` a kill for memory",
    ),
    "integrity_error": Cure(
        "`--check` found blocks or sequences that do not add up", "a fault of the scheduler; report it with the log"
    ),
    "not_now": Cure("sleep, wake, pause or resume came at a wrong moment", "end the requests under way, or try again"),
    "not_implemented": Cure("no engine of this server could do it (sleep on a CPU)", "use `--device cuda`"),
    "transport_error": Cure(
        "a connection between processes failed", "it is opened again; check that both processes run"
    ),
    "protocol_error": Cure(
        "a message did not parse, or another version of Trireme spoke", "start all processes from one installation"
    ),
    # a client of several servers (`Hosts`)
    "target_failed": Cure(
        "one of the servers of a `Hosts` client failed", "the client tries another one; see that server's log"
    ),
    "target_busy": Cure(
        "one of the servers of a `Hosts` client asked to be left alone for a time",
        "the client waits or uses another one",
    ),
}
