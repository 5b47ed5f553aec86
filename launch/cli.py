"""Entry point of `trireme`: finds the command, parses its flags, runs it, and prints an error once, last.

Imports only the table of commands; a command's module is imported when it is chosen. An exception that is not one of ours
is a bug and shows its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

from trireme.errors import TriremeError
from trireme.launch.options import find_command, help_of, overview
from trireme.launch.terminal import show

_HELP = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, the error's own, or 130 after Ctrl-C."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        return run(words)
    except TriremeError as error:
        print_error(error.message, error.hint)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output has left: nothing to say, and nobody to say it to
        return 141


def run(words: list[str]) -> int:
    if not words or words[0] in _HELP:
        print(overview())
        return 0
    if words[0] in ("-V", "--version"):
        words = ["version"]
    command, rest = find_command(words)
    for i, word in enumerate(rest):
        if word in _HELP[:2]:
            print(help_of(command, everything=rest[i + 1 : i + 2] == ["all"]))
            return 0
    invocation = import_module("trireme.launch.parse").parse(command, rest)
    status = import_module(command.module).run(invocation)
    return int(status)


def print_error(message: str, hint: str = "") -> None:
    """The form of every error: what happened with its numbers, then what to try, one cure a line."""
    show(f"error: {message}", to=sys.stderr)
    for i, cure in enumerate(line for line in hint.split("\n") if line):
        show(f"  {'try' if i == 0 else 'or ':<5} {cure}", to=sys.stderr)


if __name__ == "__main__":
    sys.exit(main())
