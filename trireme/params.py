"""Sampling parameters: SamplingParams, its bounds, and its resolution into the RowParams sent to engines.

Bounds are checked once, here, for every route and for the Python API. Error texts name the field, the value and the limit.
"""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec.structs import force_setattr

from trireme import plain
from trireme.errors import RequestError

SEED_MIN, SEED_MAX = -(2**63), 2**63 - 1
MAX_STOPS, MAX_STOP_CHARS = 16, 256
MAX_STOP_IDS = 1024
MAX_BAD_WORDS = 256
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 20
MAX_CHOICES = 128
# Logits are divided by the repetition penalty and reduced by the others, in float32: within these bounds they stay finite.
REPETITION_PENALTIES = (0.01, 100.0)
PENALTIES = (-2.0, 2.0)


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Sampling parameters of one request, in the field's usual names. Temperature 0 is greedy; top_k 0 is off.

    `stop` and `bad_words` may be one text or any series of texts, ids any series of integers, None stands for none. Raises
    RequestError that names the field.
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    bad_words: tuple[str, ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    seed: int | None = None
    logprobs: int | None = None
    prompt_logprobs: int | None = None

    def __post_init__(self) -> None:
        self._make_plain()
        check = _Bounds(self)
        check.whole("n", 1, MAX_CHOICES)
        if self.max_tokens is not None:
            check.whole("max_tokens", 0, 2**31 - 1)
        check.whole("min_tokens", 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", param="min_tokens"
            )
        check.real("temperature", 0.0, 100.0)
        check.whole("top_k", -1, 2**31 - 1)
        check.real("top_p", 0.0, 1.0, above=True)
        check.real("min_p", 0.0, 1.0)
        check.real("repetition_penalty", *REPETITION_PENALTIES)
        check.real("frequency_penalty", *PENALTIES)
        check.real("presence_penalty", *PENALTIES)
        if self.seed is not None:
            check.whole("seed", SEED_MIN, SEED_MAX)
        if self.logprobs is not None:
            check.whole("logprobs", 0, MAX_LOGPROBS)
        if self.prompt_logprobs is not None:
            check.whole("prompt_logprobs", 0, MAX_LOGPROBS)
        check.count("stop", MAX_STOPS)
        for i, text in enumerate(self.stop):
            if not text:
                raise RequestError("stop must not hold an empty string", param=f"stop[{i}]")
            if len(text) > MAX_STOP_CHARS:
                raise RequestError(
                    f"stop[{i}] has {len(text)} characters; the limit is {MAX_STOP_CHARS}", param=f"stop[{i}]"
                )
        check.count("stop_token_ids", MAX_STOP_IDS)
        check.count("bad_words", MAX_BAD_WORDS)
        for token, bias in (self.logit_bias or {}).items():
            if not -100.0 <= bias <= 100.0:  # also rejects NaN
                raise RequestError(
                    f"logit_bias of token {token} is {plain.shown(bias)}; it must be -100..100", param="logit_bias"
                )
        if self.logit_bias is not None and len(self.logit_bias) > MAX_LOGIT_BIAS:
            raise RequestError(
                f"logit_bias has {len(self.logit_bias)} entries; the limit is {MAX_LOGIT_BIAS}", param="logit_bias"
            )
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: nothing could be sampled", param="allowed_token_ids")

    def _make_plain(self) -> None:
        """Converts the values that Python callers pass to the declared types."""
        for name in ("stop", "bad_words"):
            force_setattr(self, name, plain.texts(name, getattr(self, name)))
        force_setattr(self, "stop_token_ids", plain.token_ids("stop_token_ids", self.stop_token_ids))
        if self.allowed_token_ids is not None:
            force_setattr(self, "allowed_token_ids", plain.token_ids("allowed_token_ids", self.allowed_token_ids))
        if self.logit_bias is not None:
            force_setattr(self, "logit_bias", plain.biases("logit_bias", self.logit_bias))
        for name in ("include_stop_str_in_output", "ignore_eos", "skip_special_tokens"):
            if not isinstance(value := getattr(self, name), bool):
                raise RequestError(f"{name} is {plain.shown(value)}; it must be True or False", param=name)

    def check_vocabulary(self, vocab_size: int) -> None:
        """Raises RequestError when any token id named by the caller lies outside [0, vocab_size)."""
        for name, ids in (
            ("logit_bias", self.logit_bias or ()),
            ("allowed_token_ids", self.allowed_token_ids or ()),
            ("stop_token_ids", self.stop_token_ids),
        ):
            for token in ids:
                if not 0 <= token < vocab_size:
                    raise RequestError(
                        f"{name} names token {token}; this model's vocabulary is 0..{vocab_size - 1}", param=name
                    )


class RowParams(msgspec.Struct, frozen=True, array_like=True):
    """SamplingParams as the engine core and the workers need them, resolved: one choice, a definite seed and length."""

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    choice: int = 0
    eos_token_ids: tuple[int, ...] = ()  # end the sequence; empty under ignore_eos; masked while below min_tokens
    stop_token_ids: tuple[int, ...] = ()  # also end the sequence; likewise masked while below min_tokens
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_token_ids: tuple[tuple[int, ...], ...] = ()  # token n-grams that must not be completed
    allowed_token_ids: tuple[int, ...] = ()  # empty: all
    logprobs: int = -1  # -1 none, 0 the sampled token only, k: the k likeliest as well
    prompt_logprobs: int = -1

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1.0 or self.frequency_penalty != 0.0 or self.presence_penalty != 0.0


class _Bounds:
    """Range checks that reject NaN and infinity; errors name field, value and limit."""

    def __init__(self, params: SamplingParams) -> None:
        self.params = params

    def whole(self, name: str, low: int, high: int) -> None:
        value: Any = getattr(self.params, name)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise RequestError(f"{name} is {plain.shown(value)}; it must be a whole number {low}..{high}", param=name)

    def real(self, name: str, low: float, high: float, *, above: bool = False) -> None:
        """Checks that a field is a number from `low` to `high` (above `low` if `above`). Raises RequestError."""
        value: Any = getattr(self.params, name)
        is_number = isinstance(value, int | float) and not isinstance(value, bool)
        if not is_number or not low <= value <= high or (above and value == low):  # also rejects NaN
            sign = "above" if above else "at least"
            raise RequestError(
                f"{name} is {plain.shown(value)}; it must be {sign} {low:g} and at most {high:g}", param=name
            )

    def count(self, name: str, most: int) -> None:
        have = len(getattr(self.params, name))
        if have > most:
            raise RequestError(f"{name} has {have} entries; the limit is {most}", param=name)
