"""The operators, filters, tests and methods that chat templates may use, each with a bound on what it makes and how long it takes.

Used by serving/text/template_sandbox.py. What is not listed here does not exist for a template. A bound looks at the operands
before the operation runs, since one call of a builtin cannot be interrupted.
"""

from __future__ import annotations

import functools
import json
import operator
import re
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Environment, pass_environment
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.runtime import Undefined
from jinja2.sandbox import SandboxedFormatter, safe_range
from jinja2.tests import TESTS
from jinja2.utils import Cycler, Joiner, Namespace

from trireme.serving.text.template_meter import INT_BITS_LIMIT, ITEM_LIMIT, Meter, TemplateLimit

Bound = Callable[..., None]
MAX_PAD = 64  # characters of an indentation or a separator in JSON
MAX_SEARCH = 1 << 27  # characters compared by a search that tries every place
MAX_MARKUP = 1 << 16  # characters of a text for filters that split it into words
MAX_FORM = 1 << 13  # characters of a text with fields to fill in
MAX_DATE_FORMAT = 256
MAX_PLACES = 300  # decimal places of a rounding
MAX_KEYS = 4096  # of a mapping made from pairs, whose keys may all have one hash


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else len(str(value))


# ---------------------------------------------------------------- operators


def binary(meter: Meter, name: str, left: Any, right: Any) -> Any:
    """The value of `left name right` in Python's meaning, within the limits."""
    meter.tick()
    kinds = (type(left), type(right))
    if name == "%" and isinstance(left, str):
        _bound_percent(meter, left, right)
    elif issubclass(kinds[0], int) or issubclass(kinds[1], int):
        _bound_numbers(meter, name, left, right)
    elif name == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
        if isinstance(left, str):
            meter.check(len(left) + len(right))
        else:
            meter.check(len(left) + len(right), ITEM_LIMIT, "items")
    elif not (issubclass(kinds[0], _OPERANDS) and issubclass(kinds[1], _OPERANDS)):
        raise TypeError(f"unsupported operands for {name}: {kinds[0].__name__!r} and {kinds[1].__name__!r}")
    return meter.made(_BINARY[name](left, right))


_OPERANDS = (int, float, str, list, tuple, Undefined)
_BINARY: Mapping[str, Callable[[Any, Any], Any]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.truediv,
    "//": operator.floordiv,
    "**": operator.pow,
    "%": operator.mod,
}


def _bound_numbers(meter: Meter, name: str, left: Any, right: Any) -> None:
    """Bounds on numbers, and on a sequence times a number."""
    for value in (left, right):
        if isinstance(value, int):
            meter.check(value.bit_length(), INT_BITS_LIMIT, "bits in a number")
    if name == "**" and isinstance(left, int) and isinstance(right, int):
        meter.check(left.bit_length() * abs(right), INT_BITS_LIMIT, "bits in a number")
    if name == "*":
        for some, times in ((left, right), (right, left)):
            if isinstance(some, str) and isinstance(times, int):
                meter.check(len(some) * max(0, times))
            elif hasattr(some, "__len__") and isinstance(times, int):
                meter.check(len(some) * max(0, times), ITEM_LIMIT, "items")


_PERCENT = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")


def _bound_percent(meter: Meter, form: str, values: Any) -> None:
    """Bound on printf's formatting: all widths and precisions, and the values as often as there are fields."""
    size = len(form)
    found = _PERCENT.findall(form) if size <= MAX_FORM else []
    if size > MAX_FORM or any("*" in field or len(field[0] + field[1]) > 8 for field in found):
        raise TemplateLimit("formats a text with fields of unknown or excessive width")
    size += sum(int(width or 0) + int(places or 0) for width, places in found)
    meter.check(size)
    times = len(found) if isinstance(values, dict) else 1  # only named values may be used again
    meter.check(16 * len(found) + times * _chars(meter, values))


def _chars(meter: Meter, value: Any) -> int:
    """Most characters that the printed value has."""
    value = meter.settled(value)
    if isinstance(value, str):
        return len(value)
    return len(str(value)) if isinstance(value, list | tuple | dict) else 1300


def joined(meter: Meter, parts: Iterable[Any]) -> str:
    """The text of `a ~ b ~ c`."""
    texts = [str(meter.settled(part)) for part in parts]
    meter.check(sum(map(len, texts)))
    text: str = meter.made("".join(texts))
    return text


# ---------------------------------------------------------------- bounds shared by filters and methods


def _bound_width(meter: Meter, text: Any, width: Any = 80, *_: Any) -> None:
    meter.check(_length(text))
    if isinstance(width, int):
        meter.check(width)


def _bound_replace(meter: Meter, text: Any, old: Any, new: Any, *_: Any, **__: Any) -> None:
    text, old = str(text), str(old)
    times = text.count(old) if old else len(text) + 1
    meter.check(len(text) + times * len(str(new)))


def _bound_search(meter: Meter, text: Any, part: Any = "", *_: Any, **__: Any) -> None:
    """Searches from the right, and for any of some characters, may compare everything with everything."""
    if isinstance(part, str) and len(part) * len(str(text)) > MAX_SEARCH:
        raise TemplateLimit("searches a long text for a long text")


def _bound_split(meter: Meter, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    if isinstance(maxsplit, int) and 0 <= maxsplit < ITEM_LIMIT:
        return
    parts = text.count(sep) + 1 if isinstance(sep, str) and sep else len(text.split(None, ITEM_LIMIT))
    meter.check(parts, ITEM_LIMIT, "items")


def _bound_right_split(meter: Meter, text: str, sep: Any = None, maxsplit: Any = -1) -> None:
    _bound_search(meter, text, sep)
    _bound_split(meter, text, sep, maxsplit)


def _bound_lines(meter: Meter, text: str, *_: Any, **__: Any) -> None:
    meter.check(sum(text.count(end) for end in "\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"), ITEM_LIMIT, "items")


def _bound_join(meter: Meter, sep: Any, values: Any, *_: Any) -> None:
    size = _length(values) * len(str(sep))
    meter.check(size + sum(len(v) for v in values if isinstance(v, str)))


def _bound_tabs(meter: Meter, text: str, tabsize: Any = 8) -> None:
    meter.check(len(text) + text.count("\t") * max(0, int(tabsize)))


# ---------------------------------------------------------------- methods

_HARMLESS_OF_STR = (
    "capitalize casefold endswith find index count isalnum isalpha isascii isdecimal isdigit isidentifier islower isnumeric "
    "isprintable isspace istitle isupper lower partition removeprefix removesuffix startswith swapcase title upper"
)
_STR: dict[str, Bound | None] = {
    **dict.fromkeys(_HARMLESS_OF_STR.split()),
    **dict.fromkeys(("strip", "lstrip", "rstrip", "rfind", "rindex", "rpartition"), _bound_search),
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _bound_width),
    "split": _bound_split,
    "rsplit": _bound_right_split,
    "splitlines": _bound_lines,
    "replace": _bound_replace,
    "join": _bound_join,
    "expandtabs": _bound_tabs,
}
_METHODS: Mapping[type, Mapping[str, Bound | None]] = {
    str: _STR,
    list: dict.fromkeys(("copy", "count", "index")),
    tuple: dict.fromkeys(("count", "index")),
    dict: dict.fromkeys(("copy", "get", "items", "keys", "values")),
}


def methods_of(value: Any) -> Mapping[str, Bound | None] | None:
    """Methods of a plain value with their bounds; None for values of other kinds."""
    return next((table for kind, table in _METHODS.items() if isinstance(value, kind)), None)


def call_method(meter: Meter, method: Any, args: list[Any], kwargs: dict[str, Any]) -> Any:
    """Calls a bound method of a plain value, within its bound."""
    owner, bound = method.__self__, (methods_of(method.__self__) or {})[method.__name__]
    if not isinstance(owner, str | dict):
        meter.settled(owner)
    if bound is not None:
        bound(meter, owner, *args, **kwargs)
    meter.tick(1 + (len(owner) >> 12))
    return meter.made(method(*args, **kwargs))


# ---------------------------------------------------------------- filters


def _bound_indent(meter: Meter, text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    pad = len(width) if isinstance(width, str) else int(width)
    lines = len(str(text)) if pad < 2 else str(text).count("\n") + 2
    _bound_lines(meter, str(text))
    meter.check(len(str(text)) + lines * max(0, pad))


def _bound_pieces(meter: Meter, value: Any, *counts: Any, **named: Any) -> None:
    meter.check(max((n for n in (*counts, *named.values()) if isinstance(n, int)), default=0), ITEM_LIMIT, "items")
    meter.check(_length(value), ITEM_LIMIT, "items")


def _bound_round(meter: Meter, value: Any, precision: Any = 0, *_: Any, **__: Any) -> None:
    meter.check(abs(int(precision)), MAX_PLACES, "decimal places")


def _bound_number(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    meter.check(len(value) if isinstance(value, str) else 0, INT_BITS_LIMIT // 4, "digits in a number")


def _bound_trim(meter: Meter, text: Any, chars: Any = None) -> None:
    _bound_search(meter, text, chars)


def _bound_words(meter: Meter, text: Any, *_: Any, **__: Any) -> None:
    meter.check(len(str(text)), MAX_MARKUP)


def _bound_format(meter: Meter, form: Any, *args: Any, **kwargs: Any) -> None:
    _bound_percent(meter, str(form), kwargs or args)


def _bound_list(meter: Meter, value: Any, *_: Any, **__: Any) -> None:
    meter.check(_length(value) if hasattr(value, "__len__") else 0, ITEM_LIMIT, "items")


_BOUNDS: Mapping[str, Bound] = {
    "center": _bound_width,
    "indent": _bound_indent,
    "format": _bound_format,
    "replace": _bound_replace,
    "batch": _bound_pieces,
    "slice": _bound_pieces,
    "round": _bound_round,
    "int": _bound_number,
    "float": _bound_number,
    "trim": _bound_trim,
    "list": _bound_list,
    "sort": _bound_list,
    "title": _bound_words,
    "striptags": _bound_words,
    "wordcount": _bound_words,
    "urlencode": _bound_words,
}
# They look at the outside of a value only, or give it on item by item.
_SHALLOW = "attr count d default first items last length map random reject rejectattr select selectattr safe"
_DEEP = (
    "abs capitalize dictsort e escape filesizeformat forceescape groupby lower max min reverse string truncate upper"
)
_SHALLOW_TESTS = (
    "boolean callable defined escaped false filter float integer iterable mapping none number sameas sequence string test "
    "true undefined"
)


def filters(meter: Meter) -> dict[str, Callable[..., Any]]:
    """All filters that templates may use, bounded."""
    stock: dict[str, Any] = {**FILTERS}
    found = {name: _bounded(meter, stock[name], None, deep=False) for name in _SHALLOW.split()}
    found |= {name: _bounded(meter, stock[name], None, deep=True) for name in _DEEP.split()}
    found |= {name: _bounded(meter, stock[name], bound, deep=True) for name, bound in _BOUNDS.items()}
    own = {"join": _join, "sum": _sum, "unique": _unique}
    found |= {name: _bounded(meter, _with_meter(work, meter), None, deep=True) for name, work in own.items()}
    found["tojson"] = _bounded(meter, functools.partial(_tojson, meter), None, deep=True)
    return found


def tests(meter: Meter) -> dict[str, Callable[..., Any]]:
    """All of Jinja's tests, bounded."""
    stock: dict[str, Any] = {**TESTS}
    shallow = _SHALLOW_TESTS.split()
    return {name: _bounded(meter, test, None, deep=name not in shallow) for name, test in stock.items()}


def _bounded(meter: Meter, work: Callable[..., Any], bound: Bound | None, *, deep: bool) -> Callable[..., Any]:
    """`work` within the limits. With `deep` all operands are settled before, so that it may walk through them."""
    pass_arg = getattr(work, "jinja_pass_arg", None)
    skip = 0 if pass_arg is None else 1  # the context or environment comes first

    def run(*args: Any, **kwargs: Any) -> Any:
        meter.tick()
        if deep:
            args = args[:skip] + tuple(map(meter.settled, args[skip:]))
            kwargs = {name: meter.settled(value) for name, value in kwargs.items()}
        if bound is not None:
            bound(meter, *args[skip:], **kwargs)
        return meter.made(work(*args, **kwargs))

    if pass_arg is not None:
        run.jinja_pass_arg = pass_arg  # type: ignore[attr-defined]
    return run


def _with_meter(work: Callable[..., Any], meter: Meter) -> Callable[..., Any]:
    """`work(environment, meter, ...)` as a filter that is given the environment."""

    @pass_environment
    def run(environment: Environment, *args: Any, **kwargs: Any) -> Any:
        return work(environment, meter, *args, **kwargs)

    return run


def _join(environment: Environment, meter: Meter, values: Any, d: Any = "", attribute: Any = None) -> str:
    of = _attribute(environment, attribute)
    texts, size = [], 0
    for value in values:
        texts.append(str(meter.settled(of(value))))
        size += len(texts[-1]) + len(str(d))
        meter.check(size)
        meter.tick()
    return str(d).join(texts)


def _sum(environment: Environment, meter: Meter, values: Any, attribute: Any = None, start: Any = 0) -> Any:
    of = _attribute(environment, attribute)
    return functools.reduce(lambda left, right: binary(meter, "+", left, of(right)), values, start)


def _unique(
    environment: Environment, meter: Meter, values: Any, case_sensitive: bool = False, attribute: Any = None
) -> Any:
    """The first of the items that are equal. The clock is looked at for each: all may have one hash."""
    of, seen, found = _attribute(environment, attribute), set(), []
    for value in values:
        key = meter.settled(of(value))
        key = key.lower() if isinstance(key, str) and not case_sensitive else key
        if key not in seen:
            seen.add(key)
            found.append(value)
        meter.tick(1 + (len(seen) >> 9))
    return iter(found)


def _attribute(environment: Environment, attribute: Any) -> Callable[[Any], Any]:
    return (lambda value: value) if attribute is None else make_attrgetter(environment, attribute)


def _tojson(
    meter: Meter,
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """As model templates expect it: json.dumps, without HTML escaping."""
    pads = [*(separators or ()), *([indent] if indent is not None else [])]
    meter.check(
        max((len(p) if isinstance(p, str) else int(p) for p in pads), default=0), MAX_PAD, "characters of padding"
    )
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    parts, size = [], 0
    for part in encoder.iterencode(value):
        parts.append(part)
        size += len(part)
        meter.check(size)
        meter.tick()
    return "".join(parts)


# ---------------------------------------------------------------- functions


def functions(meter: Meter) -> dict[str, Callable[..., Any]]:
    """The global functions of templates."""
    return {
        "range": safe_range,
        "dict": functools.partial(_dict, meter),
        "namespace": functools.partial(_namespace, meter),
        "cycler": Cycler,
        "joiner": Joiner,
        "raise_exception": _raise,
        "strftime_now": functools.partial(_strftime_now, meter),
    }


def _dict(meter: Meter, *args: Any, **kwargs: Any) -> dict[Any, Any]:
    meter.check(sum(map(_length, args)), MAX_KEYS, "keys")
    return dict(*args, **kwargs)


def _namespace(meter: Meter, *args: Any, **kwargs: Any) -> Namespace:
    return Namespace(_dict(meter, *args, **kwargs))


def _raise(message: Any = "") -> NoReturn:
    raise TemplateLimit(f"refuses these messages: {str(message)[:200]}")


def _strftime_now(meter: Meter, form: str) -> str:
    meter.check(len(form), MAX_DATE_FORMAT, "characters of a date's format")
    return datetime.now().strftime(form)


class BoundedFormatter(SandboxedFormatter):
    """str.format without private attributes, and with fields of moderate width."""

    def __init__(self, environment: Environment, meter: Meter) -> None:
        super().__init__(environment)
        self._meter = meter

    def format_field(self, value: Any, format_spec: str) -> Any:
        self._meter.tick()
        self._meter.check(len(format_spec), MAX_PAD)
        self._meter.check(sum(map(int, re.findall("[0-9]+", format_spec))), MAX_FORM)
        return self._meter.made(super().format_field(self._meter.settled(value), format_spec))

    def convert_field(self, value: Any, conversion: Any) -> Any:
        return super().convert_field(self._meter.settled(value), conversion)
