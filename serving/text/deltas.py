"""Deltas: what a generation adds to its choices, as typed pieces between text and wire formats.

serving/text/generation.py makes Content and Finish; a parser of reasoning or tool calls would turn some Content into the other
kinds. Formats in serving/api only render them. Pure.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import msgspec

FinishReason = Literal["stop", "length", "abort"]


class TextLogprob(NamedTuple):
    """One token with its log-probability and rank, and the k likeliest tokens at its place, best first."""

    token: int
    logprob: float
    rank: int
    top: list[tuple[int, float]]


class DeltaBase(msgspec.Struct, frozen=True):
    """`choice` counts choices over all prompts of the request. `tokens` are those that this piece came from; each token belongs to
    one piece. `logprobs` are theirs, None where the request asks for none."""

    choice: int
    tokens: list[int]
    logprobs: list[TextLogprob] | None


class Content(DeltaBase, frozen=True):
    """Text of the answer."""

    text: str


class Reasoning(DeltaBase, frozen=True):
    """Text that the model thought before it answered."""

    text: str


class ToolCallBegin(DeltaBase, frozen=True):
    """The choice begins its call number `index`, from 0, of the function `name`."""

    index: int
    call_id: str
    name: str


class ToolCallArguments(DeltaBase, frozen=True):
    """More of the JSON text of the arguments of call `index`."""

    index: int
    text: str


class Finish(DeltaBase, frozen=True):
    """The choice has ended. `text` is content that was withheld until now because a stop string might have begun in it; `stop` is
    the stop string or stop token that ended it."""

    reason: FinishReason
    stop: str | int | None = None
    text: str = ""


class Usage(msgspec.Struct, frozen=True):
    """Tokens of a request: of its prompts (`cached_tokens` of them found in the prefix cache) and of all its choices."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


TextDelta = Content | Finish
Delta = Content | Reasoning | ToolCallBegin | ToolCallArguments | Finish
