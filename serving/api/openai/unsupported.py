"""Fields of other servers' APIs that would change the answer and that this one cannot honour: each is refused by its name.

Called by serving/api/openai/wire.py with the raw fields of a body, before anything of it is built. Pure. What is unknown and in no
table is ignored and listed in x-ignored-fields: a field belongs here when ignoring it gives another answer than was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import msgspec

from trireme.errors import RequestError

MAX_NEUTRAL_BYTES = 64  # a longer value is none of the neutral ones below

Raws = Mapping[str, msgspec.Raw]


class RefusedField(NamedTuple):
    """A field that is refused, unless its value is null or one of `neutral`, which ask for nothing. `hint` names what to use."""

    neutral: tuple[Any, ...] = ()
    hint: str = ""


_NO = RefusedField((False,))
_NONE = RefusedField(([],))
_ONE = RefusedField((1,))
_ZERO = RefusedField((0,))

# Structured output: a constraint that is not kept is worse than a refusal, so an empty one is refused as well.
_CONSTRAINTS = (
    "guided_json",
    "guided_regex",
    "guided_choice",
    "guided_grammar",
    "structured_outputs",
    "grammar",
    "json_schema",
    "regex",
    "ebnf",
    "structural_tag",
)
GENERATION: Mapping[str, RefusedField] = {
    **dict.fromkeys(_CONSTRAINTS, RefusedField()),
    "stop_regex": RefusedField(hint="use stop"),
    "no_stop_trim": RefusedField((False,), "use include_stop_str_in_output"),
    # other names of the length
    "max_new_tokens": RefusedField(hint="use max_tokens"),
    "n_predict": RefusedField(hint="use max_tokens"),
    "num_predict": RefusedField(hint="use max_tokens"),
    "thinking_token_budget": RefusedField(),
    "truncate_prompt_tokens": RefusedField(),
    # other prompts and weights
    "prompt_embeds": RefusedField(),
    "input_embeds": RefusedField(),
    "kv_transfer_params": RefusedField(),
    "lora": _NONE,
    "lora_path": RefusedField(),
    "lora_request": RefusedField(),
    "session_params": RefusedField(),
    # other samplers
    "logits_processors": _NONE,
    "custom_logit_processor": RefusedField(),
    "repeat_penalty": RefusedField((1,), "use repetition_penalty"),
    "typical_p": _ONE,
    "top_a": _ZERO,
    "tfs_z": _ONE,
    "top_n_sigma": RefusedField((0, -1)),
    "xtc_probability": _ZERO,
    "dry_multiplier": _ZERO,
    "mirostat": _ZERO,
    "dynatemp_range": _ZERO,
    "smoothing_factor": _ZERO,
    "epsilon_cutoff": _ZERO,
    "eta_cutoff": _ZERO,
    "no_repeat_ngram_size": _ZERO,
    "penalty_alpha": _ZERO,
    "repetition_detection": RefusedField(),
    "num_beams": _ONE,
    "speculative": _NO,
    "samplers": RefusedField(),
    "do_sample": RefusedField((True,), "use temperature=0"),
    "mirostat_mode": _ZERO,
    "dynamic_temperature": _NO,
    "guidance_scale": _ONE,
    "negative_prompt": RefusedField(("",)),
    "repetition_penalty_range": _ZERO,
    "ban_eos_token": RefusedField((False,), "use ignore_eos"),
    "banned_strings": RefusedField(([],), "use bad_words"),
    "custom_token_bans": RefusedField(("",), "use logit_bias"),
    "grammar_string": RefusedField(("",)),
    # other answers
    "return_hidden_states": _NO,
}
_TEMPLATE: Mapping[str, RefusedField] = {"chat_template": RefusedField(), "documents": _NONE}
CHAT: Mapping[str, RefusedField] = {
    **GENERATION,
    **_TEMPLATE,
    "audio": RefusedField(),
    "web_search_options": RefusedField(),
    "prompt": RefusedField(hint="use messages"),
    "suffix": RefusedField(("",)),
    "echo": _NO,
    "add_special_tokens": _NO,  # what a conversation begins with is the template's business
}
COMPLETIONS: Mapping[str, RefusedField] = {
    **GENERATION,
    **_TEMPLATE,
    "suffix": RefusedField(("",)),
    "messages": RefusedField(hint="use /v1/chat/completions"),
    "chat_template_kwargs": RefusedField(({},), "use /v1/chat/completions"),
    "reasoning_effort": RefusedField(hint="use /v1/chat/completions"),
    "add_generation_prompt": RefusedField((False,), "use /v1/chat/completions"),
    "continue_final_message": RefusedField((False,), "use /v1/chat/completions"),
    "modalities": RefusedField((["text"],)),
    "audio": RefusedField(),
    "top_logprobs": RefusedField((0,), "use logprobs"),
}
TOKENIZE: Mapping[str, RefusedField] = {**_TEMPLATE, "reasoning_effort": RefusedField(hint="use chat_template_kwargs")}
NO_FIELDS: Mapping[str, RefusedField] = {}

# What may be called, what has to be, and the value of the second that asks for nothing.
_CALLS = (("tools", "tool_choice"), ("functions", "function_call"))
CALL_FIELDS = frozenset(name for pair in _CALLS for name in pair)


def refuse(raws: Raws, table: Mapping[str, RefusedField]) -> None:
    """Raises RequestError that names the first field of `table` with a value that asks for something."""
    for name, raw in raws.items():
        if (known := table.get(name)) is not None and _asks(raw, known.neutral):
            raise RequestError(f"{name} is not supported by this server", param=name, hint=known.hint)


def refuse_calls(raws: Raws) -> None:
    """Raises RequestError for tools (or functions) that the model may call, and for a choice among none."""
    for offered, choice in _CALLS:
        offers, chooses = _given(raws, offered, ([],)), _given(raws, choice, ("none",))
        if offers and (chooses or choice not in raws or bytes(raws[choice]) == b"null"):
            raise RequestError(f"{offered} is not supported by this server", param=offered)
        if chooses and not offers:
            raise RequestError(f"{choice} is only allowed with {offered}", param=choice)


def _given(raws: Raws, name: str, neutral: tuple[Any, ...]) -> bool:
    return name in raws and _asks(raws[name], neutral)


def _asks(raw: msgspec.Raw, neutral: tuple[Any, ...]) -> bool:
    value = bytes(raw)
    if value == b"null":
        return False
    if len(value) > MAX_NEUTRAL_BYTES:
        return True
    try:
        return msgspec.json.decode(value) not in neutral
    except (msgspec.DecodeError, UnicodeDecodeError):
        return True
