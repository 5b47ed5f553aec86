"""Entry point of `trireme`: finds the command, parses its flags, runs it, and prints an error once, last.

Imports next to nothing before signals are handled, then the table of commands; a command's module is imported when it is chosen.
An exception that is not a TriremeError is a bug and shows its traceback.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from importlib import import_module

from trireme.launch.processes.interrupts import catch_signals, leave, release_signals
from trireme.launch.stdio import WRITE_ERRORS, give_up, prepare_streams

_HELP = ("-h", "--help", "help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command and returns its exit status: 0, the error's own, or 128 + the number of the signal that ended it."""
    words = list(sys.argv[1:] if argv is None else argv)
    former = catch_signals(leave)
    if argv is None:
        prepare_streams()
        if any("-key" in word for word in words):
            import_module("trireme.launch.processes.hide").hide_keys()
    is_server = words[:1] == ["serve"]  # handles signals itself
    try:
        return _outcome(words, lambda: None if is_server else release_signals(former))
    except KeyboardInterrupt:
        return 130
    finally:
        release_signals(former, is_leaving=is_server and argv is None)


def _outcome(words: list[str], on_imported: Callable[[], None]) -> int:
    from trireme.errors import TriremeError

    try:
        status = run(words, on_imported)
        sys.stdout.flush()
        return status
    except TriremeError as error:
        print_error(error.message, error.hint)
        return error.exit_code
    except OSError as error:
        if isinstance(error, BrokenPipeError):  # our output's reader has closed the pipe: there is nobody to report to
            give_up(1)
            return 141
        if error.errno not in WRITE_ERRORS:
            raise
        give_up(1)
        print_error(f"cannot write the output: {error.strerror}")
        return 1


def run(words: list[str], on_imported: Callable[[], None]) -> int:
    """Like main, but raises. `on_imported` is called when the command is about to begin."""
    from trireme.launch.options import find_command, group_of, help_about, help_of

    if not words or words[0] in _HELP:
        print(help_about([word for word in words if word not in _HELP]))
        return 0
    if group_of(words[0]) and words[1:2] and words[1] in _HELP:
        print(help_about([words[0], *words[2:]]))
        return 0
    if words[0] in ("-V", "--version"):
        words = ["version"]
    command, rest = find_command(words)
    for i, word in enumerate(itertools.takewhile(lambda word: word != "--", rest)):
        if word in _HELP[:2]:
            print(help_of(command, everything=rest[i + 1 : i + 2] == ["all"]))
            return 0
    invocation = import_module("trireme.launch.parse").parse(command, rest)
    module = import_module(command.module)
    on_imported()
    return int(module.run(invocation))


def print_error(message: str, hint: str = "") -> None:
    """The form of every error: what happened with its numbers, then what to try, one suggestion per line."""
    from trireme.launch.terminal import show

    cures = [line for line in hint.split("\n") if line]
    lines = [f"error: {message}", *(f"  {'or ' if i else 'try':<5} {cure}" for i, cure in enumerate(cures))]
    try:
        show("\n".join(lines), to=sys.stderr)
    except OSError:  # nobody can read it; the exit status still tells
        give_up(2)


if __name__ == "__main__":
    sys.exit(main())
