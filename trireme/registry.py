"""Named plug-ins, imported on first use: ours from a table, third-party ones from entry points.

Used wherever a setting names code. Requests never do: names come from the operator only.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Generic, TypeVar, cast

from trireme.errors import ConfigError

T = TypeVar("T")


class Registry(Generic[T]):
    """`what` names one entry in errors, `group` is the entry-point group, `own` maps names to `module:attribute`."""

    def __init__(self, what: str, group: str, own: Mapping[str, str]) -> None:
        self.what = what
        self.group = group
        self._own = dict(own)

    def own_names(self) -> list[str]:
        return list(self._own)

    def names(self) -> list[str]:
        """Our own, then the installed ones."""
        return [*self._own, *(point.name for point in entry_points(group=self.group) if point.name not in self._own)]

    def find(self, name: str) -> T:
        """Raises ConfigError that lists the known names, or says why the import failed."""
        if (place := self._own.get(name)) is not None:
            return cast(T, _load(place))
        for point in entry_points(group=self.group):
            if point.name == name:
                try:
                    return cast(T, point.load())
                except (ImportError, AttributeError) as error:
                    raise ConfigError(
                        f"the {self.what} {name!r} ({point.value}) cannot be imported: {error}"
                    ) from error
        raise ConfigError(
            f"there is no {self.what} {name!r}; known: {', '.join(self.names())}",
            hint=f"a package may add one with an entry point of the group {self.group}",
        )


def _load(place: str) -> Any:
    module, _, attribute = place.partition(":")
    return getattr(import_module(module), attribute)
