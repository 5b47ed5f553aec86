"""Chat templates: Jinja in a sandbox with limits on time, memory and output, and a small registry of well-known ones.

Called by serving/api/openai/chat.py. Templates come from the model or the operator, never from a request; user text passes
through as data. Must never import, read files or run longer than its deadline.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from trireme.errors import ModelError, RequestError
from trireme.serving.text.template_meter import TemplateLimit, TemplateSlow
from trireme.serving.text.template_sandbox import Sandbox

RENDER_LIMIT_S = 0.25  # of processor time
COMPILE_LIMIT_S = 5.0
OUTPUT_LIMIT_CHARS = 4 << 20

# What templates find defined, as those that are written for transformers expect it.
_ALWAYS_GIVEN: Mapping[str, Any] = {
    "bos_token": "",
    "eos_token": "",
    "tools": None,
    "documents": None,
    "add_generation_prompt": False,
}

CHATML = (
    "{{ bos_token }}{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for message in messages %}{{ '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'"
    " + message['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"
)
LLAMA2 = (
    "{% if messages[0]['role'] == 'system' %}{% set lead = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}"
    "{% set turns = messages[1:] %}{% else %}{% set lead = '' %}{% set turns = messages %}{% endif %}"
    "{% for message in turns %}{% if message['role'] == 'assistant' %}{{ ' ' + message['content'] + ' ' + eos_token }}"
    "{% else %}{{ bos_token + '[INST] ' + (lead if loop.first else '') + message['content'] + ' [/INST]' }}{% endif %}"
    "{% endfor %}"
)
ZEPHYR = (
    "{{ bos_token }}{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PLAIN = (
    "{{ bos_token }}{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

_NULL_CONTENT = re.compile(r"\bcontent(?:'\]|\"\])?\s+is\s+(?:not\s+)?none\b", re.IGNORECASE)

REGISTRY: Mapping[str, str] = {
    "chatml": CHATML,
    "llama3": LLAMA3,
    "llama2": LLAMA2,
    "mistral": LLAMA2,
    "zephyr": ZEPHYR,
    "plain": PLAIN,
}

# A special token that gives a family away, for models that come without a template.
_MARKS = (
    ("<|im_start|>", "chatml"),
    ("<|start_header_id|>", "llama3"),
    ("[INST]", "mistral"),
    ("<|assistant|>", "zephyr"),
)


class Template:
    """One compiled chat template. `render` may be called from several threads."""

    def __init__(self, source: str, *, name: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """`special_tokens` are bos_token, eos_token, ... as strings. Raises ModelError when the source does not compile."""
        self.name = name
        self.source = source
        self._given = {**_ALWAYS_GIVEN, **(special_tokens or {})}
        self.knows_null_content = _NULL_CONTENT.search(source) is not None  # of a turn that only makes calls
        self._threads = threading.local()
        environment = Sandbox()
        environment.meter.start(COMPILE_LIMIT_S)
        try:
            self._code = environment.compile(source)
        except TemplateLimit as error:
            raise ModelError(f"the chat template {name} {error}") from None
        except Exception as error:  # the compiler raises errors of Python itself for what it cannot put into Python
            what = str(error) or type(error).__name__
            raise ModelError(f"the chat template {name} does not compile: {what[:300]}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], *, limit_s: float = RENDER_LIMIT_S, **settings: Any) -> str:
        """The prompt as text. Raises RequestError when the template refuses the messages or exceeds its limits, and
        TemplateSlow when it takes more than `limit_s` of processor time, where that is less than it may take at most."""
        environment, template = self._of_thread()
        environment.meter.start(limit_s)
        parts: list[str] = []
        size = 0
        try:
            for part in template.generate(messages=list(messages), **{**self._given, **settings}):
                size += len(part)
                if size > OUTPUT_LIMIT_CHARS:
                    raise TemplateLimit(f"made more than {OUTPUT_LIMIT_CHARS} characters")
                parts.append(part)
        except TemplateLimit as error:
            if isinstance(error, TemplateSlow) and limit_s < RENDER_LIMIT_S:
                raise
            raise RequestError(f"the chat template {error}", param="messages") from None
        except (RecursionError, MemoryError):
            raise RequestError("the chat template ran out of depth or memory", param="messages") from None
        except Exception as error:  # whatever its operators and filters raise for operands they do not take
            what = str(error)[:300] or type(error).__name__
            raise RequestError(f"the chat template cannot render these messages: {what}", param="messages") from None
        return "".join(parts)

    def _of_thread(self) -> tuple[Sandbox, jinja2.Template]:
        """This thread's own environment, whose meter counts for one rendering at a time, and the compiled template in it."""
        found: tuple[Sandbox, jinja2.Template] | None = getattr(self._threads, "found", None)
        if found is None:
            environment = Sandbox()
            template = jinja2.Template.from_code(environment, self._code, environment.make_globals(None))
            found = self._threads.found = environment, template
        return found


def find_template(
    *,
    override: str | None,
    own: str | None,
    special_tokens: Mapping[str, str],
    special_texts: frozenset[str],
    added_bos: str,
) -> Template:
    """The template to use: the operator's (a name of the registry or a file), the model's own, one for a family that the
    special tokens give away, or the plain one. One of the registry writes `added_bos`, the BOS that the tokenizer puts before
    a text by itself ("" for none); any other template writes what its author put into it."""
    if override is not None and override not in REGISTRY:
        return Template(_read(override), name=override, special_tokens=special_tokens)
    if override is None and own:
        return Template(own, name="of the model", special_tokens=special_tokens)
    name = override or next((name for mark, name in _MARKS if mark in special_texts), "plain")
    return Template(REGISTRY[name], name=name, special_tokens={**special_tokens, "bos_token": added_bos})


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(REGISTRY)
        raise ModelError(
            f"cannot read the chat template {path}: {error}", hint=f"a file, or one of: {names}"
        ) from error
