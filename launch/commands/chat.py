"""`trireme chat`: a conversation in the terminal. Ctrl-C stops an answer, /exit or Ctrl-D ends the conversation.

The answer is streamed to stdout, everything else to stderr, so that a conversation can be piped.
"""

from __future__ import annotations

import sys
import time

from trireme.errors import RequestError
from trireme.launch.commands.chat_backend import ChatBackend, make_backend
from trireme.launch.options import Invocation
from trireme.launch.stdio import utf8_only
from trireme.launch.terminal import show

HELP = "/exit ends   /new forgets the conversation   /help   Ctrl-C stops an answer"


def run(invocation: Invocation) -> int:
    """Runs a conversation until the input ends."""
    backend = make_backend(invocation)
    try:
        if sys.stdin.isatty():
            note(f"{backend.name}   {HELP}")
        converse(backend, invocation.options["system"])
    finally:
        backend.close()
    return 0


def converse(backend: ChatBackend, system: str | None) -> None:
    """Runs turns until /exit or the end of the input. The text of an interrupted answer stays in the conversation."""
    start = [{"role": "system", "content": system}] if system else []
    messages = list(start)
    while (line := read_line()) is not None:
        match line.strip():
            case "":
                continue
            case "/exit" | "/quit" | "/bye":
                return
            case "/new" | "/clear":
                messages = list(start)
                continue
            case "/help":
                note(HELP)
                continue
        messages.append({"role": "user", "content": line})
        try:
            messages.append({"role": "assistant", "content": say_answer(backend, messages)})
        except RequestError as error:
            note(f"{error.message}; /new starts anew")
            messages.pop()


def read_line() -> str | None:
    """One line from the user; None at the end of the input. Ctrl-C clears the line."""
    if not sys.stdin.isatty():
        with utf8_only():
            line = sys.stdin.readline()
            line.encode()
            return line or None
    import readline  # noqa: F401  line editing and history

    while True:
        try:
            return input("> ")
        except EOFError:
            note("")
            return None
        except KeyboardInterrupt:
            note("\n(/exit ends the conversation)")


def say_answer(backend: ChatBackend, messages: list[dict[str, str]]) -> str:
    """Streams the answer to stdout and returns it, or its beginning when the user stopped it."""
    said: list[str] = []
    begun, first = time.perf_counter(), 0.0
    try:
        for piece in backend.answer(messages):
            first = first or time.perf_counter()
            said.append(piece.text)
            show(piece.text, end="")
    except KeyboardInterrupt:
        print(" ...", end="")
    print(flush=True)
    spent = time.perf_counter() - first
    if sys.stdin.isatty() and first and spent > 0:
        note(f"[{len(said)} pieces, first after {first - begun:.2f} s, {len(said) / spent:.0f}/s]")
    return "".join(said)


def note(text: str) -> None:
    show(text, to=sys.stderr)
