"""Return types of the Python API: RequestOutput with one CompletionOutput per choice. Plain data, no behaviour."""

from __future__ import annotations

import msgspec


class TokenLogprob(msgspec.Struct, frozen=True):
    """One token's log-probability and rank (1: the likeliest), and the likeliest tokens at its position, best first."""

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


class CompletionOutput(msgspec.Struct, frozen=True, kw_only=True):
    """One answer. `stop_reason` is the stop string or stop token id that ended it, None for end-of-text and length."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None


class RequestOutput(msgspec.Struct, frozen=True, kw_only=True):
    """All answers to one prompt. Times in seconds; `first_token_s` is None when nothing was generated."""

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    num_cached_tokens: int = 0
    first_token_s: float | None = None
    total_s: float = 0.0

    @property
    def text(self) -> str:
        """The first answer's text."""
        return self.outputs[0].text


class OutputDelta(msgspec.Struct, frozen=True, kw_only=True):
    """What one token (or the end) added to one answer of a stream."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: tuple[TokenLogprob, ...] | None = None
