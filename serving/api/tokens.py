"""/tokenize and /detokenize: token ids of a prompt or of rendered messages, and the text of token ids."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.types import Receive, Scope, Send

from trireme.errors import ContextLengthError, RequestError
from trireme.serving.api.openai.wire import DetokenizeRequest, TokenizeRequest
from trireme.serving.api.routes import ApiRoute
from trireme.serving.front import Front
from trireme.serving.http.middleware import send_body
from trireme.serving.text.chat_prompt import Segments, content_chars
from trireme.serving.text.processor import check_size, check_text
from trireme.serving.text.text_bounds import context_limit

_encode = msgspec.json.encode


async def tokenize(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    """Raises RequestError, and ContextLengthError for a text that cannot fit the context."""
    async with front.admit(scope, receive, TokenizeRequest) as admitted:
        request = admitted.request
        if (request.prompt is None) == (request.messages is None):
            raise RequestError("give either prompt or messages", param="prompt")
        if request.tools and request.prompt is not None:
            raise RequestError("tools are for messages: a prompt is tokenized as it is", param="tools")
        check_messages_size(front, request)
        segments = None if request.messages is None else await front.chat_segments(request, admitted.num_bytes)
        answer = await admitted.compute(lambda: tokenized(front, request, segments))
        await send_body(send, 200, answer, admitted.headers)


async def detokenize(front: Front, scope: Scope, receive: Receive, send: Send) -> None:
    async with front.admit(scope, receive, DetokenizeRequest) as admitted:
        answer = await admitted.compute(lambda: detokenized(front, admitted.request))
    await send_body(send, 200, answer, admitted.headers)


def check_messages_size(front: Front, request: TokenizeRequest) -> None:
    """Refuses messages of more characters than could fit the context, before they are rendered. Raises ContextLengthError."""
    facts = front.client.facts
    if request.messages is not None and facts is not None:
        num_chars = sum(map(content_chars, request.messages))
        check_size(num_chars, "messages", front.tokenizer.bound, facts.max_len)


def tokenized(front: Front, request: TokenizeRequest, segments: Segments | None) -> bytes:
    """The answer's body; `segments` are the rendered messages, if there are any. Raises ContextLengthError for a text
    that cannot fit the context."""
    tokenizer, facts = front.tokenizer, front.client.facts
    max_len = facts.max_len if facts is not None else None
    if segments is not None:
        if max_len is not None:
            check_text("".join(text for text, _ in segments), "messages", tokenizer.bound, max_len)
        tokens = tokenizer.encode_segments(segments)
    else:
        text = request.prompt or ""
        if max_len is not None:
            check_text(text, "prompt", tokenizer.bound, max_len)
        tokens = tokenizer.encode(text, add_special=request.add_special_tokens is not False)
    ids = tokens.tolist()
    answer: dict[str, Any] = {"tokens": ids, "count": len(ids), "max_model_len": max_len}
    if request.return_token_strs:
        answer["token_strs"] = [front.table.shown(token) for token in ids]
    return _encode(answer)


def detokenized(front: Front, request: DetokenizeRequest) -> bytes:
    """The text of ids. Raises RequestError for an id outside the vocabulary, ContextLengthError for more ids than the
    context holds."""
    facts = front.client.facts
    if facts is not None and len(request.tokens) > facts.max_len:
        raise ContextLengthError(f"{context_limit(facts.max_len)}; tokens has {len(request.tokens)}", param="tokens")
    most = max(front.tokenizer.vocab_size, facts.vocab_size if facts else 0)
    for i, token in enumerate(request.tokens):
        if not 0 <= token < most:
            raise RequestError(f"tokens holds an id outside 0..{most - 1}", param=f"tokens[{i}]")
    text = front.tokenizer.decode(request.tokens, skip_special=bool(request.skip_special_tokens))
    return _encode({"prompt": text, "text": text})


ROUTES = (
    ApiRoute("POST", "/tokenize", tokenize),
    ApiRoute("POST", "/detokenize", detokenize),
)
