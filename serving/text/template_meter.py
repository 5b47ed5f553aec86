"""Counts what one rendering of a chat template spends, and refuses before more is spent than a rendering may.

Used by serving/text/template_bounds.py and serving/text/template_sandbox.py. One meter per environment and thread. Pure but for the
clock, which is the thread's own processor time: a busy machine makes no template slow.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from types import GeneratorType
from typing import Any

from jinja2.utils import Namespace

TEXT_LIMIT = 4 << 20  # characters of one text, and of all texts inside a container that is printed or compared
ITEM_LIMIT = 1 << 17  # items of one container
INT_BITS_LIMIT = 4096
SPENT_LIMIT = 256 << 20  # bytes of all values made in one rendering, whether still held or not
WRITTEN_LIMIT = 4 * TEXT_LIMIT  # characters put out, into captured blocks and macros too
ITEM_BYTES = 64  # about what an item of a container takes
_SHORT = 4096  # characters of texts that are counted roughly
_CLOCK_UNITS = 256  # units of work, about a microsecond each, between two looks at the clock

_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_CONTAINERS = (list, tuple, dict)
_ROWS: Any = (list, tuple, range, *_VIEWS)
_WALKED: Any = (*_CONTAINERS, Namespace, range, *_VIEWS)


class TemplateLimit(Exception):
    """A rendering went over a limit, or the template gave up. The text reads on after "the chat template"."""


class TemplateSlow(TemplateLimit):
    """A rendering took more processor time than it was given."""


class Meter:
    """The counts of the rendering that goes on. For one thread."""

    __slots__ = ("_began_s", "_due", "_limit_s", "_spent", "_units", "_written")

    def __init__(self) -> None:
        self._limit_s = float("inf")
        self._began_s = 0.0
        self._due = float(
            "inf"
        )  # by the usual clock, which is cheaper to read: no thread has computed longer than it says
        self._units = _CLOCK_UNITS
        self._spent = 0
        self._written = 0

    def start(self, limit_s: float) -> None:
        """Begins a rendering, or a compilation, that may take `limit_s` of this thread's processor time."""
        self._limit_s = limit_s
        self._began_s = time.thread_time()
        self._due = time.monotonic() + limit_s
        self._units = _CLOCK_UNITS
        self._spent = self._written = 0

    def tick(self, units: int = 1) -> None:
        """Counts work of about `units` microseconds. Raises TemplateSlow when the time is over."""
        self._units -= units
        if self._units < 0:
            self._look()

    def _look(self) -> None:
        self._units = _CLOCK_UNITS
        self.check(self._spent, SPENT_LIMIT, "bytes")
        if (now := time.monotonic()) > self._due:
            left_s = self._limit_s - (time.thread_time() - self._began_s)
            if left_s <= 0:
                raise TemplateSlow(f"ran longer than {self._limit_s * 1000:.0f} ms")
            self._due = now + left_s

    def check(self, size: int, limit: int = TEXT_LIMIT, what: str = "characters") -> None:
        """Raises TemplateLimit where something about to be made would have more than `limit`."""
        if size > limit:
            raise TemplateLimit(f"made more than {limit} {what}")

    def write(self, text: str) -> str:
        """Counts text that is put out."""
        self._written += len(text)
        self._units -= 1 + (len(text) >> 12)
        if self._written > WRITTEN_LIMIT:
            self.check(self._written, WRITTEN_LIMIT)
        if self._units < 0:
            self._look()
        return text

    def made(self, value: Any) -> Any:
        """Counts a value that an operation has made, and gives it back."""
        kind = type(value)
        if kind is str or issubclass(kind, str):
            size = len(value)
            if size > _SHORT:
                self.check(size)
                self._spent += size if value.isascii() else 4 * size
                self._units -= size >> 12
                self._look_if_due()
            else:
                self._spent += 4 * size
        elif issubclass(kind, _CONTAINERS):
            self.check(len(value), ITEM_LIMIT, "items")
            self._spent += ITEM_BYTES * len(value)
            self._units -= len(value) >> 6
            self._look_if_due()
        elif kind is int:
            self.check(value.bit_length(), INT_BITS_LIMIT, "bits in a number")
        return value

    def _look_if_due(self) -> None:
        if self._units < 0 or self._spent > SPENT_LIMIT:
            self._look()

    def settled(self, value: Any) -> Any:
        """The value, fit for an operation that walks through all of it: an iterator is read into a list, and the whole of a
        container is within the limits, items that it holds twice counted twice."""
        kind = type(value)
        if kind is str or value is None or kind is bool:
            return value
        if kind is int:
            return self.made(value)
        if isinstance(value, Iterator):
            value = list(islice(self._counted(value), ITEM_LIMIT + 1))
            self.made(value)
        if isinstance(value, _WALKED):
            self._weigh(value)
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.tick()
            yield value

    def _weigh(self, value: Any) -> None:
        chars, stack = 0, [value]
        while stack:
            self.tick()
            item = stack.pop()
            if isinstance(item, str):
                chars += len(item) + 2
            elif type(item) is int:
                chars += 2 + (self.made(item).bit_length() >> 2)
            elif isinstance(item, _ROWS):
                chars += 2 + 2 * len(item)
                self.check(chars)
                stack.extend(item)
            elif isinstance(item, dict):
                chars += 2 + 2 * len(item)
                self.check(chars)
                stack.extend(item)
                stack.extend(item.values())
            elif type(item) is Namespace:
                stack.append(object.__getattribute__(item, "_Namespace__attrs"))
                chars += 16
            else:
                chars += 2 if isinstance(item, GeneratorType) else 32
            self.check(chars)
