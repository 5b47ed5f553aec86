"""The answers of /tokenize and /detokenize, as bytes. Called by serving/app.py, for long texts in a thread."""

from __future__ import annotations

from typing import Any

import msgspec

from trireme.errors import ContextLengthError, RequestError
from trireme.serving.api.openai.wire import DetokenizeRequest, TokenizeRequest
from trireme.serving.front import Front
from trireme.serving.text.chat_prompt import Segments, content_chars
from trireme.serving.text.processor import check_size, check_text
from trireme.serving.text.text_bounds import context_limit

_encode = msgspec.json.encode


def check_messages_size(front: Front, request: TokenizeRequest) -> None:
    """Refuses messages of more characters than could fit the context, before they are rendered. Raises ContextLengthError."""
    facts = front.client.facts
    if request.messages is not None and facts is not None:
        num_chars = sum(map(content_chars, request.messages))
        check_size(num_chars, "messages", front.tokenizer.bound, facts.max_len)


def tokenized(front: Front, request: TokenizeRequest, segments: Segments | None) -> bytes:
    """The answer's body; `segments` are the rendered messages, if there are any. Texts that cannot fit the context are refused:
    their tokens would be of no use."""
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
    """The text of ids. Raises RequestError for an id that the vocabulary has not, ContextLengthError for more ids than the
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
