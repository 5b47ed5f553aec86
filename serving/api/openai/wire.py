"""The OpenAI wire: request Structs and their complete validation.

Called by the routes. Every refusal is a RequestError whose `param` is the path of the field. Nothing here knows the model
(vocabulary, context length): serving/text/processor.py checks that. Never raises anything but RequestError.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Self, TypeVar

import msgspec

from trireme.errors import RequestError
from trireme.params import MAX_BAD_WORDS, MAX_LOGIT_BIAS, MAX_STOP_IDS, MAX_STOPS, SamplingParams
from trireme.serving.api.answer import Delivery
from trireme.serving.api.json_faults import lone_surrogate, with_whole_numbers
from trireme.serving.api.openai import unsupported
from trireme.serving.text.chat_prompt import Message
from trireme.serving.text.json_bounds import MAX_DEPTH, SMALL_BYTES, FieldBounds, check_depth, check_entries

MAX_PROMPTS = 256
COMPLETION_TOKENS = 16  # length of a text completion whose request names none
SERVICE_TIERS = ("auto", "default", "flex", "scale", "priority")
MAX_NAME_BYTES = 128  # user, salt, request id

# Accepted from every client and without effect here: not worth a warning.
SILENT_FIELDS = frozenset(
    (
        "metadata",
        "store",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "verbosity",
    )
)


class WireRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A request body. `generates`: it asks for tokens, and passes the checks for those that do."""

    generates: ClassVar[bool] = False

    @classmethod
    def parse(cls, body: bytes, *, max_len: int | None = None) -> tuple[Self, list[str]]:
        """See `parse`."""
        return parse(body, cls, max_len=max_len)


class StreamOptions(msgspec.Struct, frozen=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(WireRequest, frozen=True, kw_only=True):
    """Fields that completions and chat share; null always means "not given". Those refused by name:
    serving/api/openai/unsupported.py."""

    generates: ClassVar[bool] = True

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    user: str | None = None
    service_tier: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    prompt_logprobs: int | None = None
    priority: int | None = None
    timeout: float | None = None
    queue_timeout: float | None = None
    cache_salt: str | None = None
    request_id: str | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None

    response_format: dict[str, Any] | None = None
    best_of: int | None = None
    use_beam_search: bool | None = None


class CompletionRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/completions. `prompt` is a text, texts, token ids, or lists of token ids."""

    prompt: str | list[str | int | list[int]]
    echo: bool | None = None
    logprobs: int | None = None


class ChatRequest(SamplingFields, frozen=True, kw_only=True):
    """POST /v1/chat/completions."""

    messages: list[Message]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    parallel_tool_calls: bool | None = None
    modalities: list[str] | None = None


class TokenizeRequest(WireRequest, frozen=True, kw_only=True):
    """POST /tokenize: a prompt, or messages as the chat template would render them."""

    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(WireRequest, frozen=True, kw_only=True):
    tokens: list[int]
    model: str | None = None
    skip_special_tokens: bool | None = None


Body = TypeVar("Body", bound=WireRequest)

_decoders: dict[type, msgspec.json.Decoder[Any]] = {
    kind: msgspec.json.Decoder(kind) for kind in (CompletionRequest, ChatRequest, TokenizeRequest, DetokenizeRequest)
}
_refused: dict[type, Mapping[str, unsupported.RefusedField]] = {
    CompletionRequest: unsupported.COMPLETIONS,
    ChatRequest: unsupported.CHAT,
    TokenizeRequest: unsupported.TOKENIZE,
    DetokenizeRequest: unsupported.NO_FIELDS,
}
_known: dict[type, frozenset[str]] = {
    kind: SILENT_FIELDS.union(
        (field.name for field in msgspec.structs.fields(kind)), _refused[kind], unsupported.CALL_FIELDS
    )
    for kind in _decoders
}
_ID_LISTS = ("prompt", "tokens", "stop_token_ids", "allowed_token_ids")
_whole: dict[type, frozenset[str]] = {
    kind: frozenset(f.name for f in msgspec.structs.fields(kind) if f.type == int | None or f.name in _ID_LISTS)
    for kind in _decoders
}
_keys = msgspec.json.Decoder(dict[str, msgspec.Raw])


# The most entries of a field, where decoding it unbounded would hold up everybody else.
_LIMITS = {
    "logit_bias": MAX_LOGIT_BIAS,
    "stop": MAX_STOPS,
    "stop_token_ids": MAX_STOP_IDS,
    "bad_words": MAX_BAD_WORDS,
    "allowed_token_ids": 1 << 20,  # a large vocabulary has 2^18
}
_IDS: dict[type, tuple[str, int]] = {CompletionRequest: ("prompt", MAX_PROMPTS), DetokenizeRequest: ("tokens", 1)}


def parse(body: bytes, kind: type[Body], *, max_len: int | None = None) -> tuple[Body, list[str]]:
    """The request and the names of top-level fields that were ignored. Raises RequestError naming the field; what cannot be
    honoured, and token ids beyond the context, `max_len`, are refused before anything of them is built."""
    try:
        if len(body) <= SMALL_BYTES:
            check_depth(body)
        else:
            ids, max_lists = _IDS.get(kind, ("", 1))
            check_entries(body, FieldBounds(_LIMITS, ids, max_lists, max_len))
        raws = _keys.decode(body)
        unsupported.refuse(raws, _refused[kind])
        if kind.generates:
            unsupported.refuse_calls(raws)
        request = _decode(body, kind)
    except msgspec.ValidationError as error:
        raise _named(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _malformed(body, error) from None
    except RecursionError:
        raise RequestError(f"the body is nested deeper than {MAX_DEPTH} levels") from None
    return request, [name for name in raws if name not in _known[kind]]


def _decode(body: bytes, kind: type[Body]) -> Body:
    """The request; a whole number may be written as 2.0."""
    decoder = _decoders[kind]
    try:
        request: Body = decoder.decode(body)
    except msgspec.ValidationError as error:
        if "got `float`" not in str(error) or (whole := with_whole_numbers(body, _whole[kind])) is None:
            raise
        request = decoder.decode(whole)
    return request


def _malformed(body: bytes, error: Exception) -> RequestError:
    """A body that is no JSON, or no Unicode text."""
    if (half := lone_surrogate(body, str(error))) is None:
        return RequestError(f"the body is not valid JSON: {error}")
    return RequestError(
        f"{half.path or 'the body'} holds {half.escape}, half of a surrogate pair, which is no Unicode text",
        param=half.path,
        hint="cut text between characters, not between UTF-16 units",
    )


_PATH = re.compile(r"^(?P<what>.*?)(?: - at `(?:key in )?\$\.?(?P<path>[^`]*)`)?$", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


def _named(text: str) -> RequestError:
    """msgspec's validation error as ours: `$.messages[0].role` becomes `param`."""
    match = _PATH.match(text)
    what, path = (match["what"], match["path"] or "") if match else (text, "")
    path = path.replace("[...]", "")
    if missing := _MISSING.search(what):
        path = f"{path}.{missing[1]}".lstrip(".")
        what = f"{path} is required"
    elif path:
        what = f"{path}: {what[0].lower()}{what[1:]}"
    return RequestError(what, param=path or None)


# ---------------------------------------------------------------- checks that need no model


def sampling_params(
    request: CompletionRequest | ChatRequest,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    prompt_logprobs: int | None,
) -> SamplingParams:
    """The caller's wishes as SamplingParams, with bounds checked. Raises RequestError."""
    check_supported(request)
    given: dict[str, Any] = {name: value for name in _COPIED if (value := getattr(request, name)) is not None}
    for name in ("stop_token_ids", "bad_words", "allowed_token_ids"):
        if (value := getattr(request, name)) is not None:
            given[name] = tuple(value)
    if request.stop is not None:
        given["stop"] = (request.stop,) if isinstance(request.stop, str) else tuple(request.stop)
    if request.logit_bias is not None:
        if (have := len(request.logit_bias)) > MAX_LOGIT_BIAS:
            raise RequestError(f"logit_bias has {have} entries; the limit is {MAX_LOGIT_BIAS}", param="logit_bias")
        given["logit_bias"] = {_token_key(key): bias for key, bias in request.logit_bias.items()} or None
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


@contextlib.contextmanager
def names_as_written(names: Mapping[str, str]) -> Iterator[None]:
    """RequestErrors that leave this block name fields as the caller wrote them: `names` is ours -> theirs."""
    try:
        yield
    except RequestError as error:
        for ours, theirs in names.items():
            error.message = re.sub(rf"\b{ours}\b", theirs, error.message)
            error.param = theirs if error.param == ours else error.param
        error.args = (error.message,)
        raise


def delivery_of(request: CompletionRequest | ChatRequest) -> Delivery:
    """How the answer is to be sent."""
    options = request.stream_options or StreamOptions()
    echoed = isinstance(request, CompletionRequest) and bool(request.echo)
    return Delivery(bool(request.stream), bool(options.include_usage), bool(options.continuous_usage_stats), echoed)


def length_of(request: CompletionRequest | ChatRequest) -> tuple[int | None, dict[str, str]]:
    """The longest completion that is asked for, and how errors about it name its field."""
    if request.max_completion_tokens is None:
        return request.max_tokens, {}
    return request.max_completion_tokens, {"max_tokens": "max_completion_tokens"}


_COPIED = (
    "n",
    "min_tokens",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
    "include_stop_str_in_output",
    "ignore_eos",
    "skip_special_tokens",
    "seed",
)


def _token_key(key: str) -> int:
    if not key.isascii() or not key.isdigit() or len(key) > 10:
        raise RequestError(f"logit_bias has the key {key[:40]!r}; keys are token ids", param="logit_bias")
    return int(key)


def check_supported(request: CompletionRequest | ChatRequest) -> None:
    """Refuses values of known fields that cannot be honoured, and strings over their caps."""
    if request.service_tier is not None and request.service_tier not in SERVICE_TIERS:
        raise RequestError(
            f"service_tier is {request.service_tier[:40]!r}; it must be one of {', '.join(SERVICE_TIERS)}",
            param="service_tier",
        )
    if request.best_of is not None and request.best_of != (request.n or 1):
        raise RequestError("best_of other than n is not supported by this server", param="best_of")
    if request.use_beam_search:
        raise RequestError("use_beam_search is not supported by this server", param="use_beam_search")
    for modality in getattr(request, "modalities", None) or ():
        if modality != "text":
            raise RequestError(f"modality {modality[:40]!r} is not supported; only text is", param="modalities")
    if request.stream_options is not None and not request.stream:
        raise RequestError("stream_options is only allowed with stream=true", param="stream_options")
    for name in ("user", "cache_salt", "request_id"):
        value = getattr(request, name)
        if value is not None and len(value.encode(errors="replace")) > MAX_NAME_BYTES:
            raise RequestError(f"{name} has more than {MAX_NAME_BYTES} bytes", param=name)
    if request.priority is not None and not -(2**31) <= request.priority < 2**31:
        raise RequestError(f"priority is {request.priority}; it must fit 32 bits", param="priority")
    check_response_format(request.response_format)


def check_response_format(wanted: dict[str, Any] | None) -> None:
    """Only text can be promised: JSON needs a grammar engine, and a promise that is not kept is worse than a refusal."""
    if wanted is None:
        return
    kind = wanted.get("type")
    if kind == "text":
        return
    if kind == "json_schema":
        inner = wanted.get("json_schema")
        if not isinstance(inner, dict) or not isinstance(inner.get("schema"), dict):
            raise RequestError(
                "response_format.json_schema must be an object that holds a schema", param="response_format.json_schema"
            )
        raise RequestError("response_format json_schema is not supported by this server", param="response_format")
    if kind == "json_object":
        raise RequestError("response_format json_object is not supported by this server", param="response_format")
    shown = repr(kind)[:40] if kind is not None else "missing"
    raise RequestError(
        f"response_format.type is {shown}; it must be text, json_object or json_schema", param="response_format.type"
    )


def split_prompts(prompt: str | list[str | int | list[int]]) -> list[str | list[int]]:
    """The prompts of a completion request, one by one. Raises RequestError on a mixture, on none and on too many."""
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise RequestError("prompt is empty", param="prompt")
    if all(isinstance(item, int) for item in prompt):
        return [prompt]  # type: ignore[list-item]
    if len(prompt) > MAX_PROMPTS:
        raise RequestError(f"prompt holds {len(prompt)} prompts; the limit is {MAX_PROMPTS}", param="prompt")
    kind = type(prompt[0])
    for i, item in enumerate(prompt):
        if type(item) is not kind:
            raise RequestError(
                f"prompt mixes {kind.__name__} and {type(item).__name__}; give texts, or token ids, or lists of token ids",
                param=f"prompt[{i}]",
            )
    return prompt  # type: ignore[return-value]
