"""Chat prompts: messages to prompt segments, rendered with the model's chat template.

Used by serving/front.py, serving/api and the Python API; free of HTTP. User text never yields special tokens: the names of special
tokens inside message contents are replaced by markers before rendering and become untrusted segments afterwards.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import msgspec

from trireme.errors import RequestError
from trireme.serving.text.json_bounds import MAX_DEPTH, check_depth
from trireme.serving.text.special_names import names_pattern
from trireme.serving.text.templates import RENDER_LIMIT_S, Template

MAX_MESSAGES = 4096
MAX_TOOLS = 128
MAX_TOOLS_BYTES = 256 << 10  # all together
ROLES: Mapping[str, str] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
# content parts that are text, and where it is
TEXT_PARTS: Mapping[str, str] = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_KEY_DIGITS, _INDEX_DIGITS = 24, 8  # of a marker
TEMPLATE_SETTINGS = frozenset(("enable_thinking", "thinking", "reasoning_effort", "date_string"))

Segments = list[tuple[str, bool]]
_encode = msgspec.json.encode


class ToolCallFunction(msgspec.Struct, frozen=True):
    """`arguments` is the text of a JSON object."""

    name: str = ""
    arguments: str = ""


class ToolCall(msgspec.Struct, frozen=True):
    """A call that an earlier assistant message made."""

    id: str | None = None
    type: str | None = None
    function: ToolCallFunction | None = None


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """One message of a chat, as decoded from a request."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    function_call: ToolCallFunction | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None


class ChatPrompt(msgspec.Struct, frozen=True, kw_only=True):
    """Messages alone, as the Python API takes them. Satisfies ChatPromptFields."""

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class ChatPromptFields(Protocol):
    """The fields of a request from which its chat prompt is made; null means "not given"."""

    @property
    def messages(self) -> list[Message] | None: ...

    @property
    def add_generation_prompt(self) -> bool | None: ...

    @property
    def continue_final_message(self) -> bool | None: ...

    @property
    def chat_template_kwargs(self) -> dict[str, Any] | None: ...


class ChatRenderer:
    """Renders messages with one model's template. Thread-safe."""

    def __init__(self, template: Template, special_texts: frozenset[str]) -> None:
        self.template = template
        self._special = names_pattern(special_texts)
        self.end_of_turn = self._find_end_of_turn(special_texts)

    def _find_end_of_turn(self, special_texts: frozenset[str]) -> str:
        """Name of the special token that the template writes after an assistant's content, which ends a chat whether or not
        the model's files count it as EOS; "" where it writes none."""
        mark = _Hidden(None).new_mark()
        conversation = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": mark}]
        try:
            text = self.template.render(conversation, add_generation_prompt=False)
        except RequestError:
            return ""
        after = text.rpartition(mark)[2].lstrip() if mark in text else ""
        return max((name for name in special_texts if after.startswith(name)), key=len, default="")

    def segments(self, request: ChatPromptFields, *, limit_s: float = RENDER_LIMIT_S) -> Segments:
        """(text, trusted) parts of the prompt. Raises RequestError naming the message at fault, and TemplateSlow as
        Template.render does."""
        messages = request.messages or []
        if not messages:
            raise RequestError("messages is empty", param="messages")
        if len(messages) > MAX_MESSAGES:
            raise RequestError(f"messages holds {len(messages)}; the limit is {MAX_MESSAGES}", param="messages")
        absent = None if self.template.knows_null_content else ""
        plain = [_plain_message(message, f"messages[{i}]", absent) for i, message in enumerate(messages)]
        hidden = _Hidden(self._special)
        settings = hidden.guard(_settings(request))
        prompt = request.add_generation_prompt is not False
        if request.continue_final_message:
            if request.add_generation_prompt or plain[-1]["role"] != "assistant" or "tool_calls" in plain[-1]:
                raise RequestError(
                    "continue_final_message needs an assistant message without calls at the end, "
                    "and no add_generation_prompt",
                    param="continue_final_message",
                )
            prompt = False
        guarded = [hidden.guard(message) for message in plain]
        if tools := getattr(request, "tools", None):  # /tokenize alone takes them
            settings["tools"] = hidden.guard(_checked_tools(tools))

        def render(conversation: Sequence[Mapping[str, Any]]) -> str:
            return self.template.render(conversation, limit_s=limit_s, add_generation_prompt=prompt, **settings)

        if request.continue_final_message:
            return hidden.split(continued(guarded, hidden.new_mark(), render))
        return hidden.split(render(guarded))


def continued(
    messages: Sequence[Mapping[str, Any]], mark: str, render: Callable[[Sequence[Mapping[str, Any]]], str]
) -> str:
    """The prompt up to the end of the final message's content, so that the model continues it. `mark` is a text that occurs
    nowhere else: the content is rendered with it at its end. Raises RequestError where the template drops the content."""
    *before, final = messages
    content = final["content"]
    bare = content.rstrip()
    parts = render([*before, {**final, "content": bare + mark}]).rsplit(mark, 1)
    if len(parts) < 2:
        raise RequestError(
            "the chat template leaves the final message out, so it cannot be continued", param="messages"
        )
    head, tail = parts[0].replace(mark, ""), parts[1]
    if bare == content:
        return head
    whole = render(messages)  # shows what the template keeps of the white space at the end
    kept = whole[len(head) : len(whole) - len(tail)]
    return head + kept if whole == head + kept + tail and not kept.strip() else head


class _Hidden:
    """Keeps special-token names that users wrote apart: each becomes a marker while rendering, and an untrusted segment after."""

    def __init__(self, special: re.Pattern[str] | None) -> None:
        self._special = special
        self._texts: list[str] = []
        self._key = f"{secrets.randbelow(10**_KEY_DIGITS):0{_KEY_DIGITS}d}"

    def guard(self, value: Any) -> Any:
        """`value` with markers in all its strings; the value itself when there is nothing to hide."""
        if isinstance(value, str):
            if self._special is None or not self._special.search(value):
                return value
            return self._special.sub(self._hide, value)
        if isinstance(value, dict):
            return {self.guard(key): self.guard(inner) for key, inner in value.items()}
        if isinstance(value, list):
            return [self.guard(inner) for inner in value]
        return value

    def _hide(self, match: re.Match[str]) -> str:
        return self._marker(match[0])

    def new_mark(self) -> str:
        """A marker that stands for no text."""
        return self._marker("")

    def _marker(self, text: str) -> str:
        """Digits alone: no escaping and no change of case in a template alters them."""
        self._texts.append(text)
        return f"{self._key}{len(self._texts) - 1:0{_INDEX_DIGITS}d}"

    def split(self, text: str) -> Segments:
        """(text, trusted) segments of a rendered prompt: markers become the untrusted texts that they stand for."""
        if not self._texts:
            return [(text, True)]
        parts = re.split(f"{self._key}([0-9]{{{_INDEX_DIGITS}}})", text)
        found: Segments = []
        for i, part in enumerate(parts):
            if i % 2:
                if hidden := self._texts[int(part)]:
                    found.append((hidden, False))
            elif part:
                found.append((part, True))
        return found


def _plain_message(message: Message, at: str, absent: str | None) -> dict[str, Any]:
    """A message as templates expect it: role, content as one text (`absent` where a turn makes calls only), and the optional
    parts that are present."""
    role = ROLES.get(message.role)
    if role is None:
        raise RequestError(
            f"{at}.role is {message.role[:40]!r}; it must be one of {', '.join(ROLES)}", param=f"{at}.role"
        )
    content = _content_text(message.content, f"{at}.content")
    calls = _plain_calls(message, at) if role == "assistant" else []
    if content is None and not calls:
        raise RequestError(f"{at}.content is required", param=f"{at}.content")
    plain: dict[str, Any] = {"role": role, "content": absent if content is None else content}
    if calls:
        plain["tool_calls"] = calls
    for name in ("name", "tool_call_id", "reasoning_content"):
        if (value := getattr(message, name)) is not None:
            plain[name] = value
    return plain


def _plain_calls(message: Message, at: str) -> list[dict[str, Any]]:
    """The calls of an assistant turn as templates expect them: arguments as an object, and only the fields that are given."""
    calls = list(message.tool_calls or ())
    paths = [f"{at}.tool_calls[{i}].function" for i in range(len(calls))]
    if not calls and message.function_call is not None:  # as it was written before there were tools
        calls, paths = [ToolCall(type="function", function=message.function_call)], [f"{at}.function_call"]
    plain = []
    for call, path in zip(calls, paths, strict=True):
        shown = {name: value for name in ("id", "type") if (value := getattr(call, name)) is not None}
        if call.function is not None:
            arguments = _arguments(call.function.arguments, f"{path}.arguments")
            shown["function"] = {"name": call.function.name, "arguments": arguments}
        plain.append(shown)
    return plain


def _arguments(text: str, param: str) -> dict[str, Any]:
    """The JSON object of a call's arguments; no text at all is one without fields. Raises RequestError."""
    if not text.strip():
        return {}
    try:
        body = text.encode()
        check_depth(body)
        return msgspec.json.decode(body, type=dict[str, Any])
    except RequestError:
        raise RequestError(f"{param} is nested deeper than {MAX_DEPTH} levels", param=param) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise RequestError(f"{param} must be the text of a JSON object: {error}", param=param) from None


def _content_text(content: str | list[dict[str, Any]] | None, at: str) -> str | None:
    if content is None or isinstance(content, str):
        return content
    texts = []
    for i, part in enumerate(content):
        kind = part.get("type")
        field = TEXT_PARTS.get(kind) if isinstance(kind, str) else None
        if field is None:
            what = f"[{i}] has the type {repr(kind)[:40]}" if kind is not None else f"[{i}].type is required"
            raise RequestError(f"{at}{what}; only text parts are supported by this model", param=f"{at}[{i}].type")
        text = part.get(field)
        if not isinstance(text, str):
            shown = "null" if text is None else repr(text)[:40]
            what = f"is {shown}; it must be a string" if field in part else "is required"
            raise RequestError(f"{at}[{i}].{field} {what}", param=f"{at}[{i}].{field}")
        texts.append(text)
    return "\n".join(texts)


def content_chars(message: Message) -> int:
    """How much text of a message's content the template is given."""
    content = message.content
    if content is None or isinstance(content, str):
        return len(content or "")
    texts = [part.get("text") for part in content]
    return sum(len(text) for text in texts if isinstance(text, str))


def _checked_tools(tools: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Descriptions of tools as templates write them out, within bounds. Raises RequestError."""
    if len(tools) > MAX_TOOLS:
        raise RequestError(f"tools holds {len(tools)}; the limit is {MAX_TOOLS}", param="tools")
    if (size := len(_encode(tools))) > MAX_TOOLS_BYTES:
        raise RequestError(f"tools has {size} bytes; the limit is {MAX_TOOLS_BYTES}", param="tools")
    return tools


def _settings(request: ChatPromptFields) -> dict[str, Any]:
    """Template settings that a request may give: a closed list of scalars."""
    settings: dict[str, Any] = {}
    for name, value in (request.chat_template_kwargs or {}).items():
        if name not in TEMPLATE_SETTINGS:
            known = ", ".join(sorted(TEMPLATE_SETTINGS))
            raise RequestError(
                f"chat_template_kwargs holds {name[:40]!r}; it may hold {known}", param="chat_template_kwargs"
            )
        if not isinstance(value, bool | int | float | str) or (isinstance(value, str) and len(value) > 128):
            raise RequestError(
                f"chat_template_kwargs.{name} must be a short scalar", param=f"chat_template_kwargs.{name}"
            )
        settings[name] = value
    effort = getattr(request, "reasoning_effort", None)
    if effort is not None:
        settings.setdefault("reasoning_effort", effort[:128])
    return settings
