"""What an API module brings: its routes, each with a handler and the envelope of its errors. Assembled by serving/app.py."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NamedTuple

from starlette.types import Receive, Scope, Send

from trireme.serving.front import Front
from trireme.serving.http.errors import OPENAI_ERRORS, ErrorEnvelope

Handler = Callable[[Front, Scope, Receive, Send], Awaitable[None]]


class ApiRoute(NamedTuple):
    """`path` as starlette writes it. `handler` answers, or raises what `errors` writes as the answer."""

    method: str
    path: str
    handler: Handler
    errors: ErrorEnvelope = OPENAI_ERRORS
