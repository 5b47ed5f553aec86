"""Checks on a Submit before it may touch the scheduler: one bad request must fail alone, whatever frontend sent it.

Called by core. Frontends check the same bounds with more helpful messages; this check is the engine's own.
"""

from __future__ import annotations

import math

import numpy as np

from trireme.engine_core.scheduling.scheduler import Limits
from trireme.errors import ContextLengthError, RequestError
from trireme.params import MAX_LOGPROBS, SEED_MAX, SEED_MIN, RowParams
from trireme.transport.wire.messages import MAX_WAITED_S, Submit

MAX_SALT_BYTES = 128
MAX_CLIENT_BYTES = 32


def check_submit(submit: Submit, limits: Limits) -> None:
    """Raises RequestError naming the field, its value and the limit."""
    _check_prompt(submit, limits)
    _check_params(submit.params, limits)
    if len(submit.salt) > MAX_SALT_BYTES:
        raise RequestError(f"salt has {len(submit.salt)} bytes; the limit is {MAX_SALT_BYTES}", param="salt")
    if len(submit.client) > MAX_CLIENT_BYTES:
        raise RequestError(f"client has {len(submit.client)} bytes; the limit is {MAX_CLIENT_BYTES}", param="client")
    if not -(2**31) <= submit.priority < 2**31:
        raise RequestError(f"priority is {submit.priority}; it must fit 32 bits", param="priority")
    for name, most in (("deadline_s", math.inf), ("total_s", math.inf), ("waited_s", MAX_WAITED_S)):
        value = getattr(submit, name)
        if not math.isfinite(value) or not 0 <= value <= most:
            limit = "" if math.isinf(most) else f" and at most {most:.0f}"
            raise RequestError(f"{name} is {value}; it must be finite, at least 0{limit}", param=name)


def _check_prompt(submit: Submit, limits: Limits) -> None:
    prompt = submit.prompt
    if not isinstance(prompt, np.ndarray) or prompt.ndim != 1 or prompt.dtype != np.int32:
        raise RequestError("prompt must be a flat array of int32 token ids", param="prompt")
    room = limits.max_len - (1 if submit.params.max_tokens > 0 else 0)
    if not len(prompt):
        raise RequestError("the prompt is empty", param="prompt")
    if len(prompt) > room:
        raise ContextLengthError(
            f"this engine's maximum context length is {limits.max_len} tokens; the prompt has {len(prompt)}, and {room} fit",
            param="prompt",
            hint=f"--max-len {len(prompt) + max(1, submit.params.max_tokens)}",
        )
    if not 0 <= submit.num_replayed < len(prompt):
        raise RequestError(
            f"num_replayed is {submit.num_replayed} of {len(prompt)} prompt tokens", param="num_replayed"
        )
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= limits.vocab_size:
        wrong = low if low < 0 else high
        raise RequestError(f"token id {wrong} is outside 0..{limits.vocab_size - 1}", param="prompt")


def _check_params(params: RowParams, limits: Limits) -> None:
    for name in ("temperature", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"):
        if not math.isfinite(getattr(params, name)):
            raise RequestError(f"{name} is {getattr(params, name)}; it must be finite", param=name)
    for name, low, high in (
        ("max_tokens", 0, 2**31 - 1),
        ("min_tokens", 0, params.max_tokens),
        ("seed", SEED_MIN, SEED_MAX),
        ("logprobs", -1, MAX_LOGPROBS),
        ("prompt_logprobs", -1, MAX_LOGPROBS),
    ):
        if not low <= getattr(params, name) <= high:
            raise RequestError(f"{name} is {getattr(params, name)}; it must be {low}..{high}", param=name)
    for name, ids in (
        ("logit_bias", [token for token, _ in params.logit_bias]),
        ("bad_token_ids", [token for ngram in params.bad_token_ids for token in ngram]),
        ("allowed_token_ids", params.allowed_token_ids),
    ):
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise RequestError(f"{name} names token {token}, outside 0..{limits.vocab_size - 1}", param=name)
