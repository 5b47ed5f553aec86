"""Chat templates: Jinja in a sandbox with limits on time and output, and a small registry of well-known ones.

Called by serving/api/openai/chat.py. Templates come from the model or the operator, never from a request; user text passes
through as data. Must never import, read files or run longer than its deadline.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.ext import loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

from trireme.errors import ModelError, RequestError

RENDER_LIMIT_S = 0.25
OUTPUT_LIMIT_CHARS = 4 << 20

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
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
    "{% for message in messages %}{{ '<|' + message['role'] + '|>\\n' + message['content'] + eos_token + '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% endif %}"
)
PLAIN = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

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
        self._special = dict(special_tokens or {})
        self._environment = _Sandbox()
        try:
            self._template = self._environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ModelError(f"the chat template {name} does not compile: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> str:
        """The prompt as text. Raises RequestError when the template refuses the messages or exceeds its limits."""
        self._environment.start_clock(RENDER_LIMIT_S)
        parts: list[str] = []
        size = 0
        try:
            for part in self._template.generate(
                messages=list(messages), **{**self._empty, **self._special, **settings}
            ):
                self._environment.check_clock()
                size += len(part)
                if size > OUTPUT_LIMIT_CHARS:
                    raise _Refused(f"made more than {OUTPUT_LIMIT_CHARS} characters")
                parts.append(part)
        except _Refused as error:
            raise RequestError(f"the chat template {error}", param="messages") from None
        except (jinja2.TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from None
        except (RecursionError, MemoryError):
            raise RequestError("the chat template ran out of depth or memory", param="messages") from None
        return "".join(parts)

    _empty: Mapping[str, str] = {"bos_token": "", "eos_token": ""}


def find_template(
    *, override: str | None, own: str | None, special_tokens: Mapping[str, str], special_texts: frozenset[str]
) -> Template:
    """The template to use: the operator's (a name of the registry or a file), the model's own, one for a family that the
    special tokens give away, or the plain one."""
    if override is not None:
        if override in REGISTRY:
            return Template(REGISTRY[override], name=override, special_tokens=special_tokens)
        return Template(_read(override), name=override, special_tokens=special_tokens)
    if own:
        return Template(own, name="of the model", special_tokens=special_tokens)
    for mark, name in _MARKS:
        if mark in special_texts:
            return Template(REGISTRY[name], name=name, special_tokens=special_tokens)
    return Template(PLAIN, name="plain", special_tokens=special_tokens)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(REGISTRY)
        raise ModelError(
            f"cannot read the chat template {path}: {error}", hint=f"a file, or one of: {names}"
        ) from error


class _Refused(Exception):
    """The template gave up, or ran over a limit."""


class _Clock(threading.local):
    deadline = float("inf")


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a clock: attribute, item and call operations check the deadline of the rendering thread."""

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
        self._clock = _Clock()
        self.filters["tojson"] = _tojson
        self.globals["raise_exception"] = _raise
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)

    def start_clock(self, seconds: float) -> None:
        self._clock.deadline = time.monotonic() + seconds

    def check_clock(self) -> None:
        if time.monotonic() > self._clock.deadline:
            raise _Refused(f"ran longer than {RENDER_LIMIT_S * 1000:.0f} ms")

    def getitem(self, obj: Any, argument: Any) -> Any:
        self.check_clock()
        return super().getitem(obj, argument)

    def getattr(self, obj: Any, attribute: str) -> Any:
        self.check_clock()
        return super().getattr(obj, attribute)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_clock()
        return super().call(context, obj, *args, **kwargs)


def _raise(message: str) -> NoReturn:
    raise _Refused(f"refuses these messages: {str(message)[:200]}")


def _tojson(value: Any, ensure_ascii: bool = False, indent: int | None = None, **_: Any) -> str:
    """As model templates expect it: no HTML escaping."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)
