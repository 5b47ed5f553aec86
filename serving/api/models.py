"""/v1/models: the one model that this server has."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from trireme.serving.api.routes import ApiRoute
from trireme.serving.front import Front
from trireme.serving.http.middleware import send_body

_encode = msgspec.json.encode


async def models(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, _encode({"object": "list", "data": [_model_object(front)]}))


async def model(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """One model by name. Raises ModelNotFoundError for any name but the served one."""
    if not scope["path_params"]["model"]:  # /v1/models/
        await models(front, scope, receive, send)
        return
    front.model.check(scope["path_params"]["model"])
    await send_body(send, 200, _encode(_model_object(front)))


def _model_object(front: Front) -> dict[str, Any]:
    facts = front.client.facts
    return {
        "id": front.model.name,
        "object": "model",
        "created": front.model.created,
        "owned_by": "trireme",
        "root": front.model.name,
        "parent": None,
        "max_model_len": facts.max_len if facts else None,
        "modalities": ["text"],
    }


ROUTES = (
    ApiRoute("GET", "/v1/models", models),
    ApiRoute("GET", "/v1/models/{model:path}", model),
)
