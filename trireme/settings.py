"""Flags, TRIREME_* environment names and YAML keys, all derived from the Structs of trireme/config.py.

Called by launch (command line) and by the Python API. Precedence: flag > environment > file > default. The only file that
reads the environment; children never do, they get the finished EngineConfig at birth.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import inspect

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.sizes import parse_bytes

PREFIX = "TRIREME_"
CONFIG_ENV = PREFIX + "CONFIG"

Kind = Literal["text", "whole", "real", "switch", "choice", "list"]


class Setting(NamedTuple):
    """One setting in all its spellings. `low` is exclusive when `above`."""

    group: str
    name: str
    kind: Kind
    default: Any
    help: str
    optional: bool = False
    choices: tuple[str, ...] = ()
    low: float | None = None
    high: float | None = None
    above: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def env(self) -> str:
        return PREFIX + self.name.upper()

    @property
    def key(self) -> str:
        return f"{self.group}.{self.name}"

    @property
    def limits(self) -> str:
        """What a value must be, as the words of an error or of the help."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "switch":
            return "true or false"
        if self.kind in ("whole", "real"):
            return ("a whole number" if self.kind == "whole" else "a number") + self._range()
        return "text"

    @property
    def metavar(self) -> str:
        """What follows the flag in a help text."""
        words = {"whole": "N", "real": "X", "switch": "", "list": "A,B", "choice": "|".join(self.choices)}
        return words.get(self.kind, "TEXT")

    def _range(self) -> str:
        if self.low is not None and self.high is not None:
            return f" {self.low:g}..{self.high:g}"
        if self.low is not None:
            return f" {'above' if self.above else 'of at least'} {self.low:g}"
        return ""


class Loaded(NamedTuple):
    """A configuration and, per `group.name`, where a value that is not the default came from."""

    config: EngineConfig
    sources: dict[str, str]


@functools.cache
def table() -> tuple[Setting, ...]:
    """All settings, in the order of trireme/config.py."""
    rows = []
    for group in _struct(inspect.type_info(EngineConfig)).fields:
        for field in _struct(group.type).fields:
            rows.append(_setting(group.name, field))
    return tuple(rows)


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: str | Path | None = None,
) -> Loaded:
    """Builds an EngineConfig from the file, then the environment, then `flags` (setting name -> text or value).

    `environ` defaults to the process's own; `file` to TRIREME_CONFIG. Raises ConfigError, which names the setting as its
    author spelled it, the value and the limit.
    """
    env = os.environ if environ is None else environ
    path = file or env.get(CONFIG_ENV)
    layers: list[Iterable[tuple[Setting, str, Any]]] = [
        _from_file(Path(path)) if path else (),
        _from_environ(env),
        _from_flags(flags or {}),
    ]
    values: dict[str, dict[str, Any]] = {}
    sources: dict[str, str] = {}
    for setting, spelling, raw in (item for layer in layers for item in layer):
        values.setdefault(setting.group, {})[setting.name] = value_of(setting, spelling, raw)
        sources[setting.key] = spelling
    return Loaded(msgspec.convert(values, EngineConfig), sources)


SECRET = ("api_key", "admin_key")


def to_yaml(config: EngineConfig, *, defaults: bool = False) -> str:
    """A file that gives `config` again through `load`, less its secrets. Leaves out defaults unless `defaults`."""
    lines: list[str] = []
    group = ""
    for setting in table():
        value = getattr(getattr(config, setting.group), setting.name)
        if setting.name in SECRET or (not defaults and value == setting.default):
            continue
        if setting.group != group:
            group = setting.group
            lines.append(f"{group}:")
        lines.append(f"  {setting.name}: {_scalar(value)}")
    return "\n".join(lines) + "\n" if lines else "{}\n"


def _scalar(value: Any) -> str:
    """JSON, which YAML reads, except that YAML wants characters beyond ASCII whole and not as surrogate pairs."""
    text = msgspec.json.encode(value).decode()
    return "".join(c if " " <= c < "\x7f" else f"\\U{ord(c):08x}" for c in text)


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean X?` for the closest known spelling, or nothing."""
    import difflib  # only a mistake pays for it

    close = difflib.get_close_matches(word, list(known), 1, 0.5)
    return f"; did you mean {close[0]}?" if close else ""


# ---------------------------------------------------------------- layers


def _from_flags(flags: Mapping[str, Any]) -> Iterable[tuple[Setting, str, Any]]:
    by_name = {s.name: s for s in table()}
    for name, raw in flags.items():
        if name not in by_name:
            raise ConfigError(f"there is no setting {name}{nearest(name, by_name)}")
        yield by_name[name], by_name[name].flag, raw


def _from_environ(env: Mapping[str, str]) -> Iterable[tuple[Setting, str, Any]]:
    by_env = {s.env: s for s in table()}
    for name, raw in sorted(env.items()):
        if not name.startswith(PREFIX) or name == CONFIG_ENV or _is_service_link(name, raw):
            continue
        if name not in by_env:
            raise ConfigError(f"environment: there is no setting {name}{nearest(name, by_env)}")
        yield by_env[name], f"environment {name}", raw


def _is_service_link(name: str, raw: str) -> bool:
    """Container platforms export addresses of a service called `trireme` under our prefix; they are not settings."""
    rest = name.removeprefix(PREFIX)
    return rest.startswith(("SERVICE_", "PORT_")) or (rest == "PORT" and "://" in raw)


def _from_file(path: Path) -> Iterable[tuple[Setting, str, Any]]:
    """Keys are grouped (`cache: {block_size: 16}`) or flat and spelled as the flag (`block-size: 16`)."""
    groups: dict[str, dict[str, Setting]] = {}
    for setting in table():
        groups.setdefault(setting.group, {})[setting.name] = setting
    flat = {s.name: s for s in table()}
    for key, raw in _read_yaml(path).items():
        name = str(key).replace("-", "_")
        if isinstance(raw, dict):
            if name not in groups:
                raise ConfigError(f"{path}: there is no group {key}{nearest(name, groups)}")
            for inner, value in raw.items():
                yield _named(path, str(inner), groups[name], f"{key}.{inner}"), f"{path}: {key}.{inner}", value
        else:
            yield _named(path, str(key), flat, str(key)), f"{path}: {key}", raw


def _named(path: Path, key: str, known: Mapping[str, Setting], shown: str) -> Setting:
    name = key.replace("-", "_")
    if name not in known:
        raise ConfigError(f"{path}: there is no setting {shown}{nearest(name, known)}")
    return known[name]


def _read_yaml(path: Path) -> dict[Any, Any]:
    import yaml  # costs 30 ms; only a run with a file pays

    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read the configuration file {path}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not YAML: {' '.join(str(error).split())}") from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold settings as `name: value`, not {type(data).__name__}")
    return data


# ---------------------------------------------------------------- values

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")


def value_of(setting: Setting, spelling: str, raw: Any) -> Any:
    """Text or a YAML/Python value as the setting's type, within its bounds."""
    if raw is None or (isinstance(raw, str) and raw == "" and setting.optional):
        if setting.optional:
            return None
        raise _refused(setting, spelling, raw)
    try:
        value = _convert(setting, raw)
    except (ValueError, TypeError) as error:
        raise _refused(setting, spelling, raw) from error
    if setting.name == "kv_memory":
        _check_size(spelling, value)
    if setting.name in SECRET and not all(value):
        raise ConfigError(
            f"{spelling} has an empty key, which everybody knows", hint="leave it out, or give it a value"
        )
    return value


def _convert(setting: Setting, raw: Any) -> Any:
    match setting.kind:
        case "switch":
            word = str(raw).lower()
            if word not in _TRUE + _FALSE:
                raise ValueError(word)
            return word in _TRUE
        case "whole":
            if isinstance(raw, bool | float):
                raise TypeError(raw)
            return int(_bounded(setting, int(raw)))
        case "real":
            if isinstance(raw, bool):
                raise TypeError(raw)
            return _bounded(setting, float(raw))
        case "list":
            return tuple(raw.split(",")) if isinstance(raw, str) else tuple(str(part) for part in raw)
        case "choice":
            if raw not in setting.choices:
                raise ValueError(raw)
            return raw
    if isinstance(raw, dict | list | tuple | bool):
        raise TypeError(raw)
    return str(raw)


def _bounded(setting: Setting, number: float) -> float:
    low, high = setting.low, setting.high
    if not abs(number) < 2**63:  # also refuses NaN
        raise ValueError(number)
    if low is not None and (number < low or (setting.above and number == low)):
        raise ValueError(number)
    if high is not None and number > high:
        raise ValueError(number)
    return number


def _refused(setting: Setting, spelling: str, raw: Any) -> ConfigError:
    return ConfigError(f"{spelling} is {raw!r}; it must be {setting.limits} ({setting.help})")


def _check_size(spelling: str, text: str) -> None:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{spelling} is {text!r}; {error}", hint="for example 512MiB or 4GiB") from error


# ---------------------------------------------------------------- from the Structs


def _struct(info: inspect.Type) -> inspect.StructType:
    assert isinstance(info, inspect.StructType), info
    return info


def _setting(group: str, field: inspect.Field) -> Setting:
    info, text = _plain(field.type)
    optional = False
    if isinstance(info, inspect.UnionType):
        optional = True
        info, inner = _plain(next(t for t in info.types if not isinstance(_plain(t)[0], inspect.NoneType)))
        text = text or inner
    base = Setting(group, field.name, "text", field.default, text, optional)
    match info:
        case inspect.BoolType():
            return base._replace(kind="switch")
        case inspect.LiteralType():
            return base._replace(kind="choice", choices=tuple(str(v) for v in info.values))
        case inspect.IntType() | inspect.FloatType():
            low = info.gt if info.ge is None else info.ge
            kind: Kind = "whole" if isinstance(info, inspect.IntType) else "real"
            return base._replace(kind=kind, low=low, high=info.le, above=info.gt is not None)
        case inspect.VarTupleType():
            return base._replace(kind="list")
        case inspect.StrType():
            return base
    raise TypeError(f"{group}.{field.name}: no flag can be made of {info}")


def _plain(info: inspect.Type) -> tuple[inspect.Type, str]:
    """A type without its Metadata shell, and the description found there."""
    text = ""
    while isinstance(info, inspect.Metadata):
        text = text or str((info.extra_json_schema or {}).get("description", ""))
        info = info.type
    return info, text
