"""The HTTP application: the routes of all API modules behind the middleware.

An ASGI application on starlette's router. Handlers raise TriremeErrors; serving/http/middleware.py answers them. No state:
everything shared is in serving/front.py. A new API is a module with ROUTES, added to API_ROUTES.
"""

from __future__ import annotations

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from trireme.errors import NotFoundError, RequestError, TriremeError
from trireme.serving.api import control, health, models, statistics, tokens
from trireme.serving.api.openai import chat, completions
from trireme.serving.api.routes import ApiRoute
from trireme.serving.front import Front
from trireme.serving.http.cors import AllowedOrigins
from trireme.serving.http.middleware import Admin, ApiKeys, Middleware, send_options

API_ROUTES: tuple[ApiRoute, ...] = (
    *chat.ROUTES,
    *completions.ROUTES,
    *models.ROUTES,
    *tokens.ROUTES,
    *health.ROUTES,
    *statistics.ROUTES,
    *control.ROUTES,
)


class MethodError(RequestError):
    """`allow` is the header of that name."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allow: bytes) -> None:
        super().__init__(message)
        self.allow = allow


def make_app(front: Front) -> ASGIApp:
    """The whole application: middleware, router, routes. Raises ConfigError for a malformed entry of --cors-origins."""
    table = [Route(route.path, _Endpoint(front, route)) for route in API_ROUTES]
    router = Router(table, redirect_slashes=False, default=_Unknown())
    serving = front.config.serving
    admin = Admin(control.ADMIN, ApiKeys(serving.admin_key))
    return Middleware(
        _Counted(front, router),
        keys=front.admission.keys,
        host=serving.host,
        admin=admin,
        origins=AllowedOrigins(serving.cors_origins),
    )


class _Endpoint:
    """One route as an ASGI application, so that starlette neither wraps nor copies anything."""

    def __init__(self, front: Front, route: ApiRoute) -> None:
        self._front = front
        self._route = route
        self._allow = b"GET, HEAD, OPTIONS" if route.method == "GET" else route.method.encode() + b", OPTIONS"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await send_options(send, self._allow)
            return
        method = self._route.method
        scope["state"]["errors"] = self._route.errors
        if scope["method"] != method and (scope["method"], method) != ("HEAD", "GET"):
            raise MethodError(f"{scope['path'][:100]} takes {method}", self._allow)
        await self._route.handler(self._front, scope, receive, send)


class _Unknown:
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if (scope["method"], scope["path"]) == ("OPTIONS", "*"):  # of the server as a whole
            await send_options(send, b"GET, HEAD, POST, OPTIONS")
            return
        raise NotFoundError(f"there is no route {scope['method']} {scope['path'][:100]}")


class _Counted:
    """Counts refusals by their code."""

    def __init__(self, front: Front, app: ASGIApp) -> None:
        self._front = front
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._app(scope, receive, send)
        except TriremeError as error:
            self._front.telemetry.refused(error.code)
            raise
