"""Words of a command line into an Invocation, by an argparse parser made from the table of launch/options.py.

Converting and checking values is left to trireme/settings.py, so that a flag and an environment name fail alike.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from trireme.errors import ConfigError
from trireme.launch.options import Command, Invocation, flags_of
from trireme.settings import Setting, load, nearest, value_of


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")


def parse(command: Command, words: Sequence[str], **sources: Any) -> Invocation:
    """Parses the words after the command. `sources` (environ) go to settings.load. Raises ConfigError."""
    parser = _Parser(f"trireme {command.name}", add_help=False, allow_abbrev=False, exit_on_error=False)
    for positional in command.positionals:
        parser.add_argument(positional.name, nargs="?", default=argparse.SUPPRESS)
    flags = flags_of(command)
    for setting in flags:
        _add_flag(parser, setting)
    try:
        known, extra = parser.parse_known_args(list(words))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), hint=f"trireme {command.name} --help") from error
    if extra:
        raise _unknown(extra, flags, command)
    given = vars(known)
    own = {s.name: s for s in (*command.positionals, *command.options)}
    options = {name: s.default for name, s in own.items()}
    settings = {name: raw for name, raw in given.items() if name not in own or own[name].group}
    options |= {name: value_of(own[name], own[name].flag, raw) for name, raw in given.items() if name in own}
    if not command.common:
        return Invocation(command, options, load(environ={}))
    return Invocation(command, options, load(settings, file=options.get("config"), **sources))


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    if setting.kind == "switch":
        parser.add_argument(
            setting.flag, dest=setting.name, action="store_const", const=True, default=argparse.SUPPRESS
        )
        off = "--no-" + setting.flag[2:]
        parser.add_argument(off, dest=setting.name, action="store_const", const=False, default=argparse.SUPPRESS)
    elif setting.kind == "list":
        parser.add_argument(
            setting.flag,
            dest=setting.name,
            action="extend",
            type=lambda text: text.split(","),
            default=argparse.SUPPRESS,
        )
    else:
        parser.add_argument(setting.flag, dest=setting.name, default=argparse.SUPPRESS)


def _unknown(extra: list[str], flags: Iterable[Setting], command: Command) -> ConfigError:
    word = next((w for w in extra if w.startswith("-")), "")
    if not word:
        return ConfigError(
            f"trireme {command.name} does not know what to do with {extra[0]!r}", hint=f"trireme {command.name} --help"
        )
    flag = word.split("=")[0]
    known = [s.flag for s in flags] + ["--help"]
    return ConfigError(
        f"trireme {command.name} has no flag {flag}{nearest(flag, known)}", hint=f"trireme {command.name} --help all"
    )
