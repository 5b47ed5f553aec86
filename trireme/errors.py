"""The exception tree, readable as a table of contents: each error knows its HTTP status, its exit code and a hint.

TriremeError
├── ConfigError          the operator asked for something impossible          exit 2
├── ModelError           a model file is missing, broken or unsupported       exit 3
├── RequestError         the caller's request is wrong                        400
│   ├── AuthError        no key or a wrong key                                401
│   ├── ContextLengthError  prompt and completion do not fit the context      400
│   ├── NotFoundError    unknown route or engine                              404
│   │   └── ModelNotFoundError  unknown model                                 404
│   └── TooLargeError    body or header over its limit                        413
├── OverloadedError      we are full: 429 (caller's quota) or 503 (server)    429 / 503, Retry-After
├── DeadlineError        not complete when its deadline came              504
├── SlowReaderError      its answer was not read fast enough                  408, as a stream's last event
├── EngineError          ours: the engine or one of its parts failed          500
│   ├── EngineDeadError  the engine serving this request died                 503, Retry-After
│   ├── QuarantinedError two engines died while they ran this request         422: clients must not send it again
│   └── CollectiveError  a collective between workers failed or timed out     500
└── TransportError       the wire: handshake refused, frame malformed         500
    └── ProtocolError    a frame that does not parse, or a wrong version      500
"""

from __future__ import annotations


class TriremeError(Exception):
    """Base of all errors raised on purpose. `hint` says what to try, as flags that can be pasted."""

    status = 500
    exit_code = 1
    code = "internal_error"
    kind = "server_error"

    def __init__(self, message: str, *, hint: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class ConfigError(TriremeError):
    exit_code = 2
    code = "config_error"


class ModelError(TriremeError):
    exit_code = 3
    code = "model_error"


class RequestError(TriremeError):
    """A caller's mistake. `param` names the field, as a path (`messages[0].role`)."""

    status = 400
    code = "invalid_value"
    kind = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param


class AuthError(RequestError):
    status = 401
    code = "invalid_api_key"
    kind = "authentication_error"


class ContextLengthError(RequestError):
    """More tokens than the model's context. Clients recognise the code and the words "maximum context length", and send less."""

    code = "context_length_exceeded"


class NotFoundError(RequestError):
    status = 404
    code = "not_found"


class ModelNotFoundError(NotFoundError):
    code = "model_not_found"


class TooLargeError(RequestError):
    status = 413
    code = "too_large"


class OverloadedError(TriremeError):
    """At capacity. `retry_after_s` is sent as Retry-After; `own_quota` selects 429 over 503."""

    status = 503
    code = "overloaded"
    kind = "overloaded_error"

    def __init__(self, message: str, *, retry_after_s: float = 1.0, own_quota: bool = False, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.retry_after_s = retry_after_s
        self.own_quota = own_quota
        if own_quota:
            self.status = 429
            self.code = "rate_limit_exceeded"
            self.kind = "rate_limit_error"


class TargetsMissedError(OverloadedError):
    """Both latency targets are missed at once: more work cannot be kept within either."""

    status = 429
    code = "latency_targets_missed"


class DeadlineError(TriremeError):
    """The caller's own time limit or the server's maximum expired. A retry of the same request would time out again."""

    status = 504
    code = "deadline_exceeded"
    kind = "timeout_error"


class SlowReaderError(TriremeError):
    status = 408
    code = "slow_reader"
    kind = "timeout_error"


class EngineError(TriremeError):
    code = "engine_error"


class EngineDeadError(EngineError):
    status = 503
    code = "engine_dead"
    retry_after_s = 1.0


class QuarantinedError(EngineError):
    """Not a 5xx: client libraries retry those, and this request would kill more engines."""

    status = 422
    code = "request_quarantined"


class CollectiveError(EngineError):
    code = "collective_error"


class TransportError(TriremeError):
    code = "transport_error"


class ProtocolError(TransportError):
    code = "protocol_error"
