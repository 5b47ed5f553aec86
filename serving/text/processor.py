"""From prompts and SamplingParams to rows that can be submitted: tokens, definite limits, seeds, checks against the model.

Used by the HTTP routes and by the Python API; free of HTTP. Pure but for the seed source; every refusal is a RequestError
that names the field and the number that would have worked.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from trireme import plain
from trireme.errors import ContextLengthError, RequestError
from trireme.hashing import cache_salt
from trireme.params import RowParams, SamplingParams
from trireme.serving.engines.replay import Replay, RequestLimits
from trireme.serving.text.text_bounds import TextBound, context_limit

MAX_ROWS = 512  # prompts x n
MAX_CHARS_PER_TOKEN = 256  # where the vocabulary tells no bound: a longer text fits the context with no usual tokenizer
MAX_BAD_WORD_TOKENS = 4096  # over all bad words


class TextTokenizer(Protocol):
    """What the processor needs of serving.text.tokens.Tokenizer."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    @property
    def bound(self) -> TextBound | None: ...

    def encode(self, text: str, *, add_special: bool = True, allow_special: bool = True) -> np.ndarray: ...

    def encode_inside(self, text: str) -> np.ndarray: ...

    def encode_segments(self, segments: Sequence[tuple[str, bool]], *, add_special: bool = False) -> np.ndarray: ...

    def token_bytes(self, token: int) -> bytes: ...


def check_text(text: str, param: str, bound: TextBound | None, max_len: int) -> None:
    """Refuses a string that is no Unicode text (RequestError), and a text that is more than `max_len` tokens whatever they are
    (ContextLengthError)."""
    try:
        least = bound.least_tokens(text) if bound is not None else -(-len(text) // MAX_CHARS_PER_TOKEN)
        text.encode()
    except UnicodeEncodeError:
        raise RequestError(f"{param} holds characters that are no Unicode text", param=param) from None
    if least > max_len:
        raise ContextLengthError(
            f"{context_limit(max_len)}; {param} has {len(text)} characters, which are at least {least} tokens",
            param=param,
        )


def check_size(num_chars: int, param: str, bound: TextBound | None, max_len: int) -> None:
    """Refuses so many characters if even the longest tokens would be more than `max_len`. Raises ContextLengthError."""
    most = max_len * (bound.chars_per_token if bound is not None else MAX_CHARS_PER_TOKEN)
    if num_chars > most:
        raise ContextLengthError(
            f"{context_limit(max_len)}; {param} has {num_chars} characters, and at most {most} can fit", param=param
        )


class Processor:
    """Checks and completes requests for one model. `max_len` and `vocab_size` come from the engine's facts."""

    def __init__(
        self,
        tokenizer: TextTokenizer,
        *,
        max_len: int,
        vocab_size: int,
        eos_token_ids: Iterable[int] = (),
        default_max_tokens: int | None = None,
        queue_timeout_s: float = 0.0,
        new_seed: Callable[[], int] = lambda: secrets.randbits(63),
    ) -> None:
        self.tokenizer = tokenizer
        self.max_len = max_len
        self.vocab_size = vocab_size
        self.eos_token_ids = tuple(sorted(set(eos_token_ids)))
        self.default_max_tokens = default_max_tokens
        self.queue_timeout_s = queue_timeout_s
        self._new_seed = new_seed

    # ------------------------------------------------------------ prompts

    def prompt_from_text(self, text: str, *, param: str = "prompt", add_special: bool = True) -> np.ndarray:
        """Ids of a raw prompt. The caller writes the whole prompt, so special tokens may be named in it."""
        self.check_text(text, param)
        return self.checked_prompt(self.tokenizer.encode(text, add_special=add_special, allow_special=True), param)

    def prompt_from_ids(self, ids: Sequence[int], *, param: str = "prompt") -> np.ndarray:
        """The caller's own ids, each checked against the vocabulary; integers only."""
        if len(ids) > self.max_len:
            raise self._too_long(len(ids), param)
        try:
            array = np.asarray(plain.token_ids(param, ids), dtype=np.int64)
        except OverflowError:
            array = np.array([-1], dtype=np.int64)
        wrong = np.flatnonzero((array < 0) | (array >= self.vocab_size))
        if len(wrong):
            at = int(wrong[0])
            raise RequestError(
                f"{param} holds a token id outside this model's vocabulary, 0..{self.vocab_size - 1}",
                param=f"{param}[{at}]",
            )
        return self.checked_prompt(array.astype(np.int32), param)

    def prompt_from_segments(self, segments: Sequence[tuple[str, bool]], *, param: str = "messages") -> np.ndarray:
        """Ids of a rendered chat: (text, trusted) parts, where only trusted parts may name special tokens."""
        self.check_text("".join(text for text, _ in segments), param)
        return self.checked_prompt(self.tokenizer.encode_segments(segments), param)

    def checked_prompt(self, ids: np.ndarray, param: str) -> np.ndarray:
        if len(ids) == 0:
            raise RequestError(f"{param} is empty: there is no token to continue", param=param)
        if len(ids) > self.max_len:
            raise self._too_long(len(ids), param)
        return ids

    def check_text(self, text: str, param: str) -> None:
        """Refuses texts that cannot fit the context before any work is spent on them, and strings that are no Unicode text."""
        check_text(text, param, self.tokenizer.bound, self.max_len)

    def check_size(self, num_chars: int, param: str) -> None:
        """Refuses so many characters if no text of them could fit the context."""
        check_size(num_chars, param, self.tokenizer.bound, self.max_len)

    def _too_long(self, num_tokens: int, param: str) -> ContextLengthError:
        return ContextLengthError(f"{self._limit}; {param} has {num_tokens} tokens", param=param)

    @property
    def _limit(self) -> str:
        """The beginning of errors about the context, in the words that clients look for."""
        return context_limit(self.max_len)

    # ------------------------------------------------------------ rows

    def rows(
        self,
        prompts: Sequence[np.ndarray],
        params: SamplingParams,
        *,
        salt: str | None = None,
        terms: RequestLimits = RequestLimits(),
        param: str = "prompt",
        usual_tokens: int | None = None,
        end_token_ids: Sequence[int] = (),
    ) -> list[Replay]:
        """One Replay per choice, prompt by prompt. The choices of all prompts share the request's seed. `usual_tokens` is the
        length where neither `params` nor the server's settings name one; None: all that fits. `end_token_ids` end a choice as
        EOS does."""
        if len(prompts) * params.n > MAX_ROWS:
            raise RequestError(
                f"{len(prompts)} prompts x n={params.n} are {len(prompts) * params.n} choices; the limit is {MAX_ROWS}",
                param="n",
            )
        params.check_vocabulary(self.vocab_size)
        bad = self.bad_token_ids(params.bad_words)
        ends = tuple(sorted({*self.eos_token_ids, *end_token_ids}))
        self._check_can_sample(params, bad, ends)
        seed = params.seed if params.seed is not None else self._new_seed()
        digest = cache_salt(terms.scope, salt)
        return [
            Replay(
                prompt,
                self._row_params(
                    params, self._max_tokens(params, len(prompt), param, usual_tokens), seed, choice, bad, ends
                ),
                prompt_index=i,
                salt=digest,
                priority=terms.priority,
                deadline_s=terms.queue_s or self.queue_timeout_s,
                total_s=terms.total_s,
                client=terms.client,
                itl_target_s=terms.itl_target_s,
            )
            for i, prompt in enumerate(prompts)
            for choice in range(params.n)
        ]

    def _check_can_sample(
        self, params: SamplingParams, bad: tuple[tuple[int, ...], ...], end_ids: tuple[int, ...]
    ) -> None:
        """Refuses parameters that leave no token for the very first draw. (Longer bad words may still do so later.)"""
        if params.max_tokens == 0:
            return
        masked = {ids[0] for ids in bad if len(ids) == 1}
        if not self._leaves_any(params, masked):
            what = "the vocabulary" if params.allowed_token_ids is None else "allowed_token_ids"
            raise RequestError(f"bad_words masks every token of {what}: nothing could be sampled", param="bad_words")
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else end_ids)}
        if params.min_tokens and not self._leaves_any(params, masked | ends):
            raise RequestError(
                f"min_tokens is {params.min_tokens}, and every token that allowed_token_ids and bad_words leave ends the answer",
                param="min_tokens",
            )

    def _leaves_any(self, params: SamplingParams, masked: set[int]) -> bool:
        if params.allowed_token_ids is None:
            return sum(0 <= token < self.vocab_size for token in masked) < self.vocab_size
        return not masked.issuperset(params.allowed_token_ids)

    def _row_params(
        self,
        params: SamplingParams,
        max_tokens: int,
        seed: int,
        choice: int,
        bad: tuple[tuple[int, ...], ...],
        ends: tuple[int, ...],
    ) -> RowParams:
        return RowParams(
            max_tokens=max_tokens,
            min_tokens=params.min_tokens,
            temperature=float(params.temperature),
            top_k=max(0, params.top_k),
            top_p=float(params.top_p),
            min_p=float(params.min_p),
            repetition_penalty=float(params.repetition_penalty),
            frequency_penalty=float(params.frequency_penalty),
            presence_penalty=float(params.presence_penalty),
            seed=seed,
            choice=choice,
            eos_token_ids=() if params.ignore_eos else ends,
            stop_token_ids=params.stop_token_ids,
            logit_bias=tuple((params.logit_bias or {}).items()),
            bad_token_ids=bad,
            allowed_token_ids=params.allowed_token_ids or (),
            logprobs=-1 if params.logprobs is None else params.logprobs,
            prompt_logprobs=-1 if params.prompt_logprobs is None else params.prompt_logprobs,
        )

    def _max_tokens(self, params: SamplingParams, num_prompt: int, param: str, usual_tokens: int | None) -> int:
        """The definite completion length, within the context."""
        room = self.max_len - num_prompt
        wanted = params.max_tokens
        if wanted is None:
            if room < 1:
                raise ContextLengthError(
                    f"{self._limit}; {param} has {num_prompt} tokens, which leaves no room for an answer", param=param
                )
            usual = usual_tokens if self.default_max_tokens is None else self.default_max_tokens
            wanted = room if usual is None else min(room, usual)
            wanted = max(wanted, min(room, params.min_tokens))
        if wanted > room:
            raise ContextLengthError(
                f"{self._limit}; {param} has {num_prompt} tokens and max_tokens is {wanted}: at most {room} fit",
                param="max_tokens",
            )
        if params.min_tokens > wanted:
            raise RequestError(
                f"min_tokens is {params.min_tokens}; at most {wanted} tokens can come", param="min_tokens"
            )
        return wanted

    def bad_token_ids(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Token sequences that spell a bad word in running text, with a space before it and without."""
        found: dict[tuple[int, ...], None] = {}
        for i, word in enumerate(words):
            if not word.strip():
                raise RequestError("bad_words must not hold an empty word", param=f"bad_words[{i}]")
            if len(word) > 256:
                raise RequestError(
                    f"bad_words[{i}] has {len(word)} characters; the limit is 256", param=f"bad_words[{i}]"
                )
            self.check_text(word, f"bad_words[{i}]")
            bare = word.lstrip()
            for form in (word, bare, " " + bare):
                ids = self.tokenizer.encode_inside(form)
                if len(ids):
                    found[tuple(ids.tolist())] = None
        if sum(map(len, found)) > MAX_BAD_WORD_TOKENS:
            raise RequestError(f"bad_words make more than {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")
        return tuple(found)


class ProcessorCache:
    """The Processor for what the engines said last. `new` makes one from `max_len` and `vocab_size`."""

    def __init__(self, new: Callable[[int, int], Processor]) -> None:
        self._new = new
        self._known: Processor | None = None

    def get(self, max_len: int, vocab_size: int) -> Processor:
        """The same one as long as both numbers stay."""
        known = self._known
        if known is None or (known.max_len, known.vocab_size) != (max_len, vocab_size):
            known = self._known = self._new(max_len, vocab_size)
        return known
