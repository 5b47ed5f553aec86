"""Errors as HTTP answers: the status, Retry-After, and the body that an API's clients expect.

Used by serving/http/middleware.py, serving/http/sse.py and serving/http/listener.py. Pure. OpenAI's envelope is the default; an API
with another one gives its routes an ErrorEnvelope of its own.
"""

from __future__ import annotations

from typing import Any, Protocol

import msgspec
from starlette.types import Scope

from trireme.errors import EngineDeadError, OverloadedError, TriremeError


class ErrorEnvelope(Protocol):
    """How one API writes an error."""

    def body(self, error: BaseException, request_id: str = "") -> bytes:
        """The body of an error answer, and the data of an error event in a stream. JSON."""
        ...


class OpenAIErrors:
    """`{"error": {"message", "type", "param", "code"}}`."""

    def body(self, error: BaseException, request_id: str = "") -> bytes:
        return error_body(error, request_id)


OPENAI_ERRORS = OpenAIErrors()


def envelope_of(scope: Scope) -> ErrorEnvelope:
    """The envelope of the route that a request was dispatched to; OpenAI's before that."""
    found: ErrorEnvelope = scope.get("state", {}).get("errors", OPENAI_ERRORS)
    return found


def error_object(error: BaseException, request_id: str = "") -> dict[str, Any]:
    """The inside of OpenAI's error envelope. Errors that are not ours get a fixed text: details go to the log only."""
    if isinstance(error, TriremeError):
        message = error.message + (f" ({error.hint})" if error.hint else "")
        return {
            "message": message,
            "type": error.kind,
            "param": getattr(error, "param", None),
            "code": error.code,
        }
    where = f"; the log has details under {request_id}" if request_id else ""
    return {"message": f"internal error{where}", "type": "server_error", "param": None, "code": "internal_error"}


def error_body(error: BaseException, request_id: str = "") -> bytes:
    return msgspec.json.encode({"error": error_object(error, request_id)})


def error_status(error: BaseException) -> int:
    return error.status if isinstance(error, TriremeError) else 500


def retry_after(error: BaseException) -> float | None:
    """Seconds for Retry-After, or None."""
    if isinstance(error, OverloadedError | EngineDeadError):
        return error.retry_after_s
    return None
