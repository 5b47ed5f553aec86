"""`trireme complete`: continues one text and streams the result; or prints one JSON object."""

from __future__ import annotations

import json
import sys

from trireme.launch.commands.chat_backend import make_backend
from trireme.launch.options import Invocation
from trireme.launch.stdio import utf8_only
from trireme.launch.terminal import show


def read_input() -> str:
    """All of standard input. Raises RequestError."""
    with utf8_only():
        text = sys.stdin.read()
        text.encode()  # some locales let undecodable bytes through
        return text


def run(invocation: Invocation) -> int:
    """Prints the continuation; Ctrl-C stops it."""
    options = invocation.options
    prompt = read_input() if options["prompt"] == "-" else options["prompt"]
    backend = make_backend(invocation)
    said: list[str] = []
    finish: str | None = None
    try:
        for piece in backend.complete(prompt):
            said.append(piece.text)
            finish = piece.finish or finish
            if not options["json"]:
                show(piece.text, end="")
    finally:
        backend.close()
    if options["json"]:
        print(json.dumps({"model": backend.name, "text": "".join(said), "finish_reason": finish}))
    else:
        print()
    return 0
