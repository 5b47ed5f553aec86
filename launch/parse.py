"""Parses a command line into an Invocation, with an argparse parser made from the table of launch/options.py.

Converting and checking values is left to trireme/settings.py, so that a flag and an environment name fail alike.
"""

from __future__ import annotations

import argparse
import itertools
import re
from collections.abc import Iterable, Sequence
from typing import Any, NoReturn

from trireme.errors import ConfigError
from trireme.launch.options import Command, Invocation, flags_of, off_flag, spellings
from trireme.settings import SECRET, SWITCH_WORDS, Setting, load, nearest, value_of


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ConfigError(message, hint=f"{self.prog} --help")


def parse(command: Command, words: Sequence[str], **sources: Any) -> Invocation:
    """Parses the words after the command. `sources` (environ) go to settings.load. Raises ConfigError."""
    parser = _Parser(f"trireme {command.name}", add_help=False, allow_abbrev=False, exit_on_error=False)
    flags = flags_of(command)
    for setting in flags:
        _add_flag(parser, setting)
    end = words.index("--") if "--" in words else len(words)  # after it nothing is a flag
    try:
        known, extra = parser.parse_known_args(_plain_switches(words[:end], flags, command))
    except argparse.ArgumentError as error:
        raise ConfigError(str(error), hint=f"{parser.prog} --help") from None
    if unknown := next((word for word in extra if _FLAG.fullmatch(word)), ""):
        raise _unknown(unknown, flags, command)
    given = vars(known) | _by_position([*extra, *words[end + 1 :]], words[:end], flags, command)
    own = {s.name: s for s in (*command.positionals, *command.options)}
    options = {name: s.default for name, s in own.items()}
    settings = {name: raw for name, raw in given.items() if name not in own or own[name].group}
    for name in given.keys() & own.keys():
        spelling = name.upper() if own[name] in command.positionals else own[name].flag
        options[name] = value_of(own[name], spelling, given[name])
    if not command.common:
        return Invocation(command, options, load(environ={}))
    return Invocation(command, options, load(settings, file=options.get("config"), **sources))


_FLAG = re.compile(
    r"-(?!\d*\.?\d+$)[^ ]+"
)  # neither `-`, nor a negative number, nor a text with spaces that begins with a dash


def _add_flag(parser: argparse.ArgumentParser, setting: Setting) -> None:
    if setting.kind == "switch":
        for flag, is_on in ((setting.flag, True), (off_flag(setting), False)):
            parser.add_argument(flag, dest=setting.name, action="store_const", const=is_on, default=argparse.SUPPRESS)
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


# ---------------------------------------------------------------- switches


def _plain_switches(words: Sequence[str], flags: Sequence[Setting], command: Command) -> list[str]:
    """The words with `--x=true` as `--x` and `--x=false` as `--no-x`. Raises ConfigError for `--x false`, where argparse would
    take `false` as the model, except where a text may follow."""
    switches = {spelling: s for s in flags if s.kind == "switch" for spelling in (s.flag, off_flag(s))}
    found = []
    for word in words:
        flag, equals, value = word.partition("=")
        setting = switches.get(flag) if equals else None
        if setting is None:
            found.append(word)
        elif flag != setting.flag:
            raise ConfigError(f"{flag} takes no value", hint=f"{flag}, or {setting.flag}=true")
        else:
            found.append(setting.flag if value_of(setting, flag, value) else off_flag(setting))
    if not _takes_text(command):
        _check_apart(words, flags)
    return found


def _check_apart(words: Sequence[str], flags: Sequence[Setting]) -> None:
    """Raises ConfigError for a switch with its value as the next word."""
    switches = {spelling: s for s in flags if s.kind == "switch" for spelling in (s.flag, off_flag(s))}
    for word, following in itertools.pairwise(words):
        if word in switches and following.lower() in SWITCH_WORDS:
            setting = switches[word]
            is_on = value_of(setting, word, following) == (word == setting.flag)
            raise ConfigError(
                f"{word} is a switch: {following!r} after it is not its value",
                hint=f"{setting.flag if is_on else off_flag(setting)}, or {setting.flag}={'true' if is_on else 'false'}",
            )


# ---------------------------------------------------------------- words


def _by_position(
    words: Sequence[str], before: Sequence[str], flags: Sequence[Setting], command: Command
) -> dict[str, str]:
    """Positional words, in the order of the command's positionals. `before`: all words, flags included."""
    most = len(command.positionals)
    if len(words) > most:
        _check_apart(before, flags)
        has_key = any(word.startswith(f"--{name.replace('_', '-')}") for word in before for name in SECRET)
        odd = f"{len(words) - most} more word(s)" if has_key else repr(words[most])  # it may be a key
        raise ConfigError(
            f"trireme {command.name} does not know what to do with {odd}", hint=f"trireme {command.name} --help"
        )
    return {place.name: word for place, word in zip(command.positionals, words, strict=False)}


def _unknown(word: str, flags: Iterable[Setting], command: Command) -> ConfigError:
    flag = word.split("=")[0]
    known = [spelling for s in flags for spelling in spellings(s)] + ["--help"]
    cures = [f"trireme {command.name} --help all"]
    if _takes_text(command):
        cures.append(f"trireme {command.name} ... -- TEXT   where a text begins with a dash")
    return ConfigError(f"trireme {command.name} has no flag {flag}{nearest(flag, known)}", hint="\n".join(cures))


def _takes_text(command: Command) -> bool:
    return any(place.name == "prompt" for place in command.positionals)
