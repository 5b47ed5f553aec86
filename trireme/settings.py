"""Flags, TRIREME_* environment names and YAML keys, all derived from the Structs of trireme/config.py.

Called by launch (command line) and by the Python API. Precedence: flag > environment > file > default. The only module that reads
the environment; children never do, they get the resolved EngineConfig in Boot.
"""

from __future__ import annotations

import functools
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
from msgspec import inspect

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.keys import check_keys, read_keys
from trireme.sizes import parse_bytes
from trireme.yaml_text import Value, read_yaml

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
        """The allowed values, as worded in errors and in the help."""
        if self.kind == "choice":
            return "one of " + ", ".join(self.choices)
        if self.kind == "switch":
            return "true or false"
        if self.kind in ("whole", "real"):
            return ("a whole number" if self.kind == "whole" else "a number") + self._range()
        return "text"

    @property
    def metavar(self) -> str:
        """The placeholder after the flag in a help text."""
        words = {"whole": "N", "real": "X", "switch": "", "list": "A,B", "choice": "|".join(self.choices)}
        return words.get(self.kind, "TEXT")

    def _range(self) -> str:
        low, high = (
            f"{x:.0f}" if x is not None and self.kind == "whole" else f"{x or 0:g}" for x in (self.low, self.high)
        )
        if self.low is not None and self.high is not None:
            return f" {low}..{high}"
        if self.low is not None:
            return f" {'above' if self.above else 'of at least'} {low}"
        return ""


class Loaded(NamedTuple):
    """A configuration and, per `group.name`, the source of each value that is not the default."""

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

    `environ` defaults to the process's own; `file` to TRIREME_CONFIG. Keys from a file of keys are added to the others. Raises
    ConfigError, which names the setting as its author spelled it, the value (but for keys) and the limit.
    """
    env = os.environ if environ is None else environ
    path = env.get(CONFIG_ENV) if file is None else file
    if file is not None and not str(file):
        raise ConfigError("--config names no file", hint="leave it out, or name one")
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
    _add_keys_of_files(values.get("serving", {}), sources)
    return Loaded(msgspec.convert(values, EngineConfig), sources)


SECRET = ("api_key", "admin_key")
KEY_FILES = tuple(f"{name}_file" for name in SECRET)


def without_keys(config: EngineConfig) -> EngineConfig:
    """The same deployment without its secrets, for those who need no key: engines, files, other programs."""
    return msgspec.structs.replace(config, serving=msgspec.structs.replace(config.serving, **dict.fromkeys(SECRET, ())))


def _add_keys_of_files(serving: dict[str, Any], sources: Mapping[str, str]) -> None:
    for name, file in zip(SECRET, KEY_FILES, strict=True):
        if serving.get(file) is not None:
            found = read_keys(sources[f"serving.{file}"], serving[file])
            serving[name] = tuple(dict.fromkeys((*serving.get(name, ()), *found)))


def to_yaml(config: EngineConfig, *, defaults: bool = False) -> str:
    """YAML from which `load` gives `config` again, without its secrets. Omits defaults unless `defaults`."""
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
    """A scalar as JSON, which YAML can read, except that YAML needs non-ASCII characters verbatim, not as surrogate pairs."""
    text = msgspec.json.encode(value).decode()
    return "".join(c if " " <= c < "\x7f" else f"\\U{ord(c):08x}" for c in text)


def nearest(word: str, known: Iterable[str], *, prefix: str = "") -> str:
    """`; did you mean X?` for the closest known spelling, or nothing. `prefix`, common to all, is ignored in the comparison."""
    import difflib  # imported only for a mistyped name

    close = difflib.get_close_matches(word.removeprefix(prefix), [k.removeprefix(prefix) for k in known], 1, 0.5)
    return f"; did you mean {prefix}{close[0]}?" if close else ""


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
            raise ConfigError(f"environment: there is no setting {name}{nearest(name, by_env, prefix=PREFIX)}")
        yield by_env[name], f"environment {name}", raw


_URL, _NUMBER, _PLACE = r"(tcp|udp|sctp)://\S+:\d+", r"\d+", r"[\w.:-]+"
_EACH_PORT = r"PORT_\d+_(TCP|UDP|SCTP)"
_SERVICE_LINKS = [
    (re.compile(rf"(\w+_)?{suffix}"), re.compile(form))
    for suffix, form in (
        ("SERVICE_HOST", _PLACE),
        (r"SERVICE_PORT(_\w+)?", _NUMBER),
        ("PORT", _URL),
        (_EACH_PORT, _URL),
        (_EACH_PORT + "_PROTO", "tcp|udp|sctp"),
        (_EACH_PORT + "_PORT", _NUMBER),
        (_EACH_PORT + "_ADDR", _PLACE),
    )
]


def _is_service_link(name: str, raw: str) -> bool:
    """Kubernetes gives every pod the addresses of neighbouring services. Those of a service called `trireme` or `trireme-api`
    have our prefix and are not settings."""
    rest = name.removeprefix(PREFIX)
    return any(suffix.fullmatch(rest) and form.fullmatch(raw) for suffix, form in _SERVICE_LINKS)


def _from_file(path: Path) -> Iterable[tuple[Setting, str, Any]]:
    """Settings from a YAML file. Keys are grouped (`cache: {block_size: 16}`) or flat, spelled as the flag (`block-size: 16`)."""
    data = read_yaml(path)
    if data is not None and not isinstance(data, dict):
        raise ConfigError(
            f"{path} must hold settings as `name: value`, not {'text' if isinstance(data, str) else 'a list'}"
        )
    seen: dict[str, str] = {}
    for key, raw in (data or {}).items():
        for setting, shown, value in _entries(path, key, raw):
            if setting.key in seen:
                raise ConfigError(f"{path} has {setting.key} twice, as {seen[setting.key]} and as {shown}")
            seen[setting.key] = shown
            yield setting, f"{path}: {shown}", value


def _entries(path: Path, key: str, raw: Value) -> Iterable[tuple[Setting, str, Value]]:
    """The settings under one top-level key."""
    flat = {s.name: s for s in table()}
    groups: dict[str, dict[str, Setting]] = {}
    for setting in table():
        groups.setdefault(setting.group, {})[setting.name] = setting
    name = key.replace("-", "_")
    if isinstance(raw, dict):
        if name not in groups:
            what = f"; it is a setting of {flat[name].group}" if name in flat else nearest(name, groups)
            raise ConfigError(f"{path}: there is no group {key}{what}")
        for inner, value in raw.items():
            yield _named(path, inner, groups[name], flat, f"{key}.{inner}"), f"{key}.{inner}", value
    elif name in groups and name not in flat:
        if raw is not None:
            first = next(iter(groups[name]))
            raise ConfigError(f"{path}: {key} is a group of settings, not a value", hint=f"{key}: {{{first}: ...}}")
    else:
        yield _named(path, key, {**groups, **flat}, flat, key), key, raw


def _named(path: Path, key: str, known: Mapping[str, Any], flat: Mapping[str, Setting], shown: str) -> Setting:
    name = key.replace("-", "_")
    if name in known and name in flat:
        return flat[name]
    what = f"; it belongs to {flat[name].group}" if name in flat else nearest(name, known)
    raise ConfigError(f"{path}: there is no setting {shown}{what}")


# ---------------------------------------------------------------- values

_TRUE, _FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
SWITCH_WORDS = _TRUE + _FALSE


def value_of(setting: Setting, spelling: str, raw: Any) -> Any:
    """Text or a YAML/Python value as the setting's type, within its bounds. Raises ConfigError."""
    if raw == "" and setting.name in (*KEY_FILES, "quotas"):  # an unset variable must not disable authentication
        raise ConfigError(f"{spelling} names no file of keys", hint="leave it out, or name one")
    if raw is None or (
        isinstance(raw, str) and raw == "" and setting.optional and (setting.group or setting.kind != "text")
    ):
        if setting.optional:
            return None
        raise _refused(setting, spelling, raw)
    try:
        value = _convert(setting, raw)
    except (ValueError, TypeError):
        raise _refused(setting, spelling, raw) from None  # the cause contains the value, which may be a key
    if setting.name == "kv_memory":
        _check_size(spelling, value)
    if setting.name in SECRET:
        check_keys(spelling, value)
    return value


def _convert(setting: Setting, raw: Any) -> Any:
    match setting.kind:
        case "switch":
            word = str(raw).lower()
            if word not in SWITCH_WORDS:
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
            parts = raw.split(",") if isinstance(raw, str) else raw
            if not isinstance(parts, list | tuple):
                raise TypeError(raw)
            return tuple(_text(part) for part in parts)
        case "choice":
            if raw not in setting.choices:
                raise ValueError(raw)
            return raw
    return _text(raw)


def _text(raw: Any) -> str:
    """Text that a path, a message and a header can carry."""
    if raw is None or isinstance(raw, dict | list | tuple | bool):
        raise TypeError(raw)
    text = str(raw)
    if "\0" in text:
        raise ValueError(text)
    text.encode()  # ValueError for bytes that were not UTF-8
    return text


def _bounded(setting: Setting, number: float) -> float:
    low, high = setting.low, setting.high
    if not abs(number) < 2**63:  # also rejects NaN
        raise ValueError(number)
    if low is not None and (number < low or (setting.above and number == low)):
        raise ValueError(number)
    if high is not None and number > high:
        raise ValueError(number)
    return number


MAX_SHOWN = 80


def _refused(setting: Setting, spelling: str, raw: Any) -> ConfigError:
    shown = repr(raw)
    if setting.name in SECRET:
        shown = "not shown here"
    elif len(shown) > MAX_SHOWN:
        shown = f"{shown[:MAX_SHOWN]}..."
    is_text = setting.kind in ("text", "list") and isinstance(raw, str)
    limits = "text in UTF-8, without a zero byte" if is_text else setting.limits
    return ConfigError(f"{spelling} is {shown}; it must be {limits} ({setting.help})")


def _check_size(spelling: str, text: str) -> None:
    try:
        parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"{spelling} is {text[:MAX_SHOWN]!r}; {error}", hint="for example 512MiB or 4GiB") from error


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
    """A type without its Metadata wrapper, and the description found there."""
    text = ""
    while isinstance(info, inspect.Metadata):
        text = text or str((info.extra_json_schema or {}).get("description", ""))
        info = info.type
    return info, text
