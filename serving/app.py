"""The HTTP application: routes, from the bytes of a request to the bytes of its answer.

An ASGI application on starlette's router, wrapped by serving/http/middleware.py. Every handler raises ours or RequestErrors
and lets the gate answer. No state: everything shared is in serving/front.py.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import numpy as np
from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from trireme import __version__
from trireme.errors import NotFoundError, RequestError, TooLargeError, TriremeError
from trireme.params import SamplingParams
from trireme.serving.admission.admission import Caller
from trireme.serving.api import control
from trireme.serving.api.openai.chat import ChatFormat
from trireme.serving.api.openai.completions import CompletionFormat
from trireme.serving.api.openai.echo import Echo, echo_of_ids, echo_of_text
from trireme.serving.api.openai.wire import (
    COMPLETION_TOKENS,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    TokenizeRequest,
    length_of,
    names_as_written,
    parse,
    sampling_params,
    split_prompts,
)
from trireme.serving.api.tokenize import check_messages_size, detokenized, tokenized
from trireme.serving.engines.replay import Replay
from trireme.serving.front import Front, Visit
from trireme.serving.http.cors import AllowedOrigins
from trireme.serving.http.middleware import Admin, ApiKeys, Middleware, send_body, send_options
from trireme.serving.http.sse import FIRST_EVENT_S, EventStream, Format, Outcome
from trireme.serving.metrics.telemetry import CONTENT_TYPE, merged, page
from trireme.serving.text.chat_prompt import content_chars
from trireme.serving.text.generation import Generation
from trireme.serving.text.json_bounds import SMALL_BYTES
from trireme.serving.text.processor import Processor
from trireme.topology.zones import MAX_LABEL

BODY_TIMEOUT_S = 30.0
STATISTICS_TIMEOUT_S = 0.5

Handler = Callable[[Front, Scope, Receive, Send], Awaitable[None]]
Headers = list[tuple[bytes, bytes]]
Body = TypeVar("Body", CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
_encode = msgspec.json.encode


class MethodError(RequestError):
    """`allow` is the header of that name."""

    status = 405
    code = "method_not_allowed"

    def __init__(self, message: str, allow: bytes) -> None:
        super().__init__(message)
        self.allow = allow


class MediaTypeError(RequestError):
    status = 415
    code = "unsupported_media_type"


class TimeoutRequestError(RequestError):
    status = 408
    code = "timeout"


def make_app(front: Front) -> ASGIApp:
    """The whole application: gate, router, routes. Raises ConfigError for an entry of --cors-origins that is no origin."""
    routes: list[tuple[str, str, Handler]] = [
        ("POST", "/v1/chat/completions", _chat),
        ("POST", "/v1/completions", _completions),
        ("GET", "/v1/models", _models),
        ("GET", "/v1/models/{model:path}", _model),
        ("POST", "/tokenize", _tokenize),
        ("POST", "/detokenize", _detokenize),
        ("GET", "/health", _alive),
        ("GET", "/live", _alive),
        ("GET", "/ready", _ready),
        ("GET", "/startup", _startup),
        ("GET", "/metrics", _metrics),
        ("GET", "/load", _load),
        ("GET", "/version", _version),
        ("POST", "/sleep", control.sleep),
        ("POST", "/wake_up", control.wake_up),
        ("GET", "/is_sleeping", control.is_sleeping),
        ("POST", "/pause", control.pause),
        ("POST", "/resume", control.resume),
        ("GET", "/is_paused", control.is_paused),
    ]
    table = [Route(path, _Endpoint(front, method, handler)) for method, path, handler in routes]
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

    def __init__(self, front: Front, method: str, handler: Handler) -> None:
        self._front = front
        self._method = method
        self._allow = b"GET, HEAD, OPTIONS" if method == "GET" else method.encode() + b", OPTIONS"
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] == "OPTIONS":
            await send_options(send, self._allow)
            return
        if scope["method"] != self._method and (scope["method"], self._method) != ("HEAD", "GET"):
            raise MethodError(f"{scope['path'][:100]} takes {self._method}", self._allow)
        await self._handler(self._front, scope, receive, send)


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


# ---------------------------------------------------------------- reading


async def _read(front: Front, scope: Scope, receive: Receive, visit: Visit, kind: type[Body]) -> tuple[Body, Headers]:
    """The parsed body, and a header that lists ignored fields. Counts while reading; never holds more than the limit. The request
    is inside from then on."""
    limit = front.config.serving.body_limit
    length = encoding = media = b""
    for name, value in scope["headers"]:
        if name == b"content-length":
            length = value
        elif name == b"content-encoding":
            encoding = value
        elif name == b"content-type":
            media = value
    if length.isdigit() and int(length[:20]) > limit:
        raise TooLargeError(f"the body has {int(length[:20])} bytes; the limit is {limit}")
    if encoding not in (b"", b"identity"):
        raise MediaTypeError("compressed bodies are not accepted")
    if media and not media.split(b";")[0].strip().lower().endswith((b"/json", b"+json")):
        raise MediaTypeError("send the body as JSON, with content-type: application/json")
    body = await _read_body(front, receive, visit, limit)
    visit.enter()
    facts = front.client.facts
    max_len = facts.max_len if facts is not None else None
    request, unknown = await front.off_loop(len(body), lambda: parse(body, kind, max_len=max_len), most=SMALL_BYTES)
    names = ", ".join(name[:40] for name in unknown[:20] if name.isascii() and name.isprintable())
    return request, [(b"x-ignored-fields", names.encode())] if unknown else []


async def _read_body(front: Front, receive: Receive, visit: Visit, limit: int) -> bytes:
    parts: list[bytes] = []
    loop = asyncio.get_running_loop()
    body = visit.body
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S) as timer:

            def stop() -> None:
                with contextlib.suppress(RuntimeError):  # its time is up already
                    timer.reschedule(loop.time())

            body.stop = stop
            while True:
                message = await receive()
                if body.refusal is not None:
                    raise body.refusal
                if message["type"] == "http.disconnect":
                    raise RequestError("the client left before its request was complete")
                part = message.get("body", b"")
                front.bodies.take(body, len(part))
                if body.num_bytes > limit:
                    raise TooLargeError(f"the body has more than {limit} bytes, the limit")
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        if body.refusal is not None:
            raise body.refusal from None
        raise TimeoutRequestError(f"the body did not arrive within {BODY_TIMEOUT_S:.0f} s") from None
    finally:
        body.stop = None


def _pin(scope: Scope) -> int:
    """Engine demanded by X-data-parallel-rank, or -1."""
    for name, value in scope["headers"]:
        if name == b"x-data-parallel-rank":
            if not value.isdigit() or len(value) > 6:
                raise RequestError("X-data-parallel-rank must be the number of an engine", param="x-data-parallel-rank")
            return int(value)
    return -1


def _label(scope: Scope) -> str:
    """Place named by X-Trireme-Label, or nothing."""
    for name, value in scope["headers"]:
        if name == b"x-trireme-label":
            if len(value) > MAX_LABEL or not value.isascii():
                raise RequestError(
                    f"X-Trireme-Label must be a label of at most {MAX_LABEL} ASCII characters", param="x-trireme-label"
                )
            return str(value, "ascii")
    return ""


# ---------------------------------------------------------------- generation


async def _chat(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    caller = front.admission.caller(scope)
    with front.inside(caller, generates=True) as visit:
        request, headers = await _read(front, scope, receive, visit, ChatRequest)
        front.check_model(request.model)
        terms = front.admission.terms(request, caller, scope)
        front.check_room(terms.priority)
        params = _chat_params(request)
        processor = front.processor
        processor.check_size(sum(map(content_chars, request.messages)), "messages")
        segments = await front.chat_segments(request, visit.body.num_bytes)

        def work() -> list[Replay]:
            return processor.rows(
                [processor.prompt_from_segments(segments)],
                params,
                salt=request.cache_salt,
                terms=terms,
                param="messages",
                end_token_ids=front.chat_ends,
            )

        with names_as_written(length_of(request)[1]):
            rows = await front.off_loop(visit.body.num_bytes, work)
        visit.drop_body()

        def form(_: Generation) -> Format:
            return ChatFormat(
                request,
                answer_id="chatcmpl-" + (request.request_id or scope["state"]["request_id"]),
                created=int(time.time()),
                model=front.model_name,
                table=front.table,
                num_choices=len(rows),
                prompt=rows[0].prompt.tolist() if request.return_token_ids else (),
                request_usage=_wants_usage(request),
            )

        await _answer(front, scope, receive, send, request, params, rows, form, headers, caller, route="chat")


def _chat_params(request: ChatRequest) -> SamplingParams:
    top = request.top_logprobs
    if top is not None and not request.logprobs and top > 0:
        raise RequestError("top_logprobs needs logprobs=true", param="top_logprobs")
    if request.prompt_logprobs is not None:
        raise RequestError("prompt_logprobs is not supported for chat by this server", param="prompt_logprobs")
    max_tokens, names = length_of(request)
    with names_as_written({**names, "logprobs": "top_logprobs"}):
        return sampling_params(
            request, max_tokens=max_tokens, logprobs=(top or 0) if request.logprobs else None, prompt_logprobs=None
        )


async def _completions(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    caller = front.admission.caller(scope)
    with front.inside(caller, generates=True) as visit:
        request, headers = await _read(front, scope, receive, visit, CompletionRequest)
        front.check_model(request.model)
        terms = front.admission.terms(request, caller, scope)
        front.check_room(terms.priority)
        if request.prompt_logprobs is not None and request.stream:
            raise RequestError("prompt_logprobs is not supported with stream=true", param="prompt_logprobs")
        echo_logprobs = request.logprobs if request.echo else None
        max_tokens, names = length_of(request)
        with names_as_written(names):
            params = sampling_params(
                request,
                max_tokens=max_tokens,
                logprobs=request.logprobs,
                prompt_logprobs=request.prompt_logprobs if request.prompt_logprobs is not None else echo_logprobs,
            )
        prompts = split_prompts(request.prompt)
        processor = front.processor

        def work() -> tuple[list[Replay], list[Echo] | None]:
            tokens = _prompt_tokens(processor, request, prompts)
            rows = processor.rows(tokens, params, salt=request.cache_salt, terms=terms, usual_tokens=COMPLETION_TOKENS)
            if not request.echo:
                return rows, None
            return rows, [_echo(front, request, prompt, ids) for prompt, ids in zip(prompts, tokens, strict=True)]

        with names_as_written(names):
            rows, echoes = await front.off_loop(visit.body.num_bytes, work)
        visit.drop_body()

        def form(generation: Generation) -> Format:
            return CompletionFormat(
                request,
                generation,
                answer_id="cmpl-" + (request.request_id or scope["state"]["request_id"]),
                created=int(time.time()),
                model=front.model_name,
                table=front.table,
                echoes=echoes,
                request_usage=_wants_usage(request),
            )

        await _answer(front, scope, receive, send, request, params, rows, form, headers, caller, route="completions")


def _prompt_tokens(
    processor: Processor, request: CompletionRequest, prompts: list[str | list[int]]
) -> list[np.ndarray]:
    found = []
    for i, prompt in enumerate(prompts):
        param = "prompt" if len(prompts) == 1 else f"prompt[{i}]"
        if isinstance(prompt, str):
            add_special = request.add_special_tokens is not False
            found.append(processor.prompt_from_text(prompt, param=param, add_special=add_special))
        else:
            found.append(processor.prompt_from_ids(prompt, param=param))
    return found


def _echo(front: Front, request: CompletionRequest, prompt: str | list[int], ids: np.ndarray) -> Echo:
    if isinstance(prompt, str):
        return echo_of_text(front.tokenizer, prompt, ids, add_special=request.add_special_tokens is not False)
    return echo_of_ids(front.tokenizer, ids)


def _wants_usage(request: CompletionRequest | ChatRequest) -> bool:
    return bool(request.stream_options and request.stream_options.include_usage)


async def _answer(
    front: Front,
    scope: Scope,
    receive: Receive,
    send: Send,
    request: CompletionRequest | ChatRequest,
    params: SamplingParams,
    rows: list[Replay],
    layer_config_of: Callable[[Generation], Format],
    headers: Headers,
    caller: Caller,
    *,
    route: str,
) -> None:
    """Submits and answers, streamed or whole. Counts the request in once and out once, whatever happens."""
    pin, label = _pin(scope), _label(scope)
    front.admit_rows(len(rows), sum(len(row.prompt) for row in rows), rows[0].priority)
    echoed = isinstance(request, CompletionRequest) and bool(request.echo)
    generation = Generation(front.client, front.table, rows, params, echoed=echoed)
    form = layer_config_of(generation)
    front.telemetry.received(route, generation, len(rows))
    front.admission.charge(caller, generation.usage().prompt_tokens)
    headers += front.admission.headers(caller)
    outcome: Outcome = "error"
    stream = EventStream(scope, receive, send, generation)
    try:
        with front.coming(len(rows)):
            await stream.submit(pin=pin, label=label)
        if stream.has_left():
            outcome = "cancelled"
            return
        first = await stream.first()
        if wait_s := generation.queued_s or (FIRST_EVENT_S if first == [] else 0.0):
            front.admission.waited(wait_s, front.num_under_way())
        if request.stream:
            front.ticker.streams.add(stream)
            options = request.stream_options
            outcome = await stream.run(
                form,
                first,
                headers,
                include_usage=_wants_usage(request),
                continuous_usage=bool(options and options.continuous_usage_stats),
            )
            return
        deltas = first
        while deltas is not None:
            for delta in deltas:
                form.add(delta)
            batch = await generation.next()
            deltas = batch[0] if batch is not None else None
        if stream.has_left():
            outcome = "cancelled"
            return
        front.ticker.streams.add(stream)
        outcome = await stream.write_whole(form.whole(generation), headers)
    except asyncio.CancelledError:
        outcome = "cancelled"
        raise
    finally:
        front.ticker.streams.discard(stream)
        stream.close()
        front.tell_rows()
        front.telemetry.ended(outcome, generation)
        front.admission.charge(caller, generation.usage().completion_tokens)


# ---------------------------------------------------------------- tokens


async def _tokenize(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    with front.inside(front.admission.caller(scope), generates=False) as visit:
        request, headers = await _read(front, scope, receive, visit, TokenizeRequest)
        front.check_model(request.model)
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.tools and request.prompt is not None:
            raise RequestError("tools are for messages: a prompt is tokenized as it is", param="tools")
        check_messages_size(front, request)
        segments = None if request.messages is None else await front.chat_segments(request, visit.body.num_bytes)
        answer = await front.off_loop(visit.body.num_bytes, lambda: tokenized(front, request, segments))
        visit.drop_body()
        await send_body(send, 200, answer, headers)


async def _detokenize(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    with front.inside(front.admission.caller(scope), generates=False) as visit:
        request, headers = await _read(front, scope, receive, visit, DetokenizeRequest)
        front.check_model(request.model)
        answer = await front.off_loop(visit.body.num_bytes, lambda: detokenized(front, request))
    await send_body(send, 200, answer, headers)


# ---------------------------------------------------------------- models, state, numbers


def _model_object(front: Front) -> dict[str, Any]:
    facts = front.client.facts
    return {
        "id": front.model_name,
        "object": "model",
        "created": front.created,
        "owned_by": "trireme",
        "root": front.model_name,
        "parent": None,
        "max_model_len": facts.max_len if facts else None,
        "modalities": ["text"],
    }


async def _models(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, _encode({"object": "list", "data": [_model_object(front)]}))


async def _model(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    if not scope["path_params"]["model"]:  # /v1/models/
        await _models(front, scope, receive, send)
        return
    front.check_model(scope["path_params"]["model"])
    await send_body(send, 200, _encode(_model_object(front)))


async def _alive(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, b'{"status":"alive"}')


async def _ready(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """200 when a request sent now would be answered, else 503 with how far things are."""
    readiness = front.readiness()
    answer: dict[str, Any] = {
        "status": readiness.phase,
        "engines": [
            {
                "engine": state.engine,
                "up": state.is_up,
                "epoch": state.epoch,
                "rows": state.num_rows,
                "stalled": state.stalled,
                "reason": state.reason,
            }
            for state in readiness.engines
        ],
    }
    if front.progress and not readiness.can_answer:
        answer["progress"] = [{"source": source, **phase} for source, phase in front.progress.items()]
    await send_body(send, 200 if readiness.can_answer else 503, _encode(answer))


async def _startup(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    phase = front.readiness().phase
    await send_body(send, 503 if phase == "loading" else 200, _encode({"status": phase}))


async def _version(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    await send_body(send, 200, _encode({"version": __version__}))


async def _load(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """For balancers outside: what the engines behind this address have to do, and whether more would be taken."""
    loads = await front.client.loads(STATISTICS_TIMEOUT_S)
    answer = {
        "status": front.readiness().phase,
        "num_rows": front.client.num_rows,
        "capacity": front.client.capacity,
        "engines": [{"engine": engine, **load} for engine, load in sorted(loads.items())],
    }
    await send_body(send, 200, _encode(answer))


async def _metrics(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    engines = front.client.states()

    async def ask(engine: int) -> dict[str, Any]:
        try:
            found = await front.client.call(engine, "stats", timeout_s=STATISTICS_TIMEOUT_S)
        except (TriremeError, TimeoutError):
            return {}
        return found if isinstance(found, dict) else {}

    snapshots, *answers = await asyncio.gather(
        front.snapshots(), *(ask(state.engine) for state in engines if state.is_up)
    )
    known = dict(zip((state.engine for state in engines if state.is_up), answers, strict=True))
    totals = front.shared.totals
    statistics = {state.engine: totals.over_lives(state.engine, known.get(state.engine, {})) for state in engines}
    build = {"version": __version__, "model": front.model_name}
    text = page(merged(snapshots), engines, statistics, build)
    await send_body(send, 200, text, kind=CONTENT_TYPE)
