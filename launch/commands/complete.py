"""`trireme complete`: continues one text and prints what comes, as it comes; or as one JSON object."""

from __future__ import annotations

import json
import sys

from trireme.launch.commands.chat_backend import make_talker
from trireme.launch.options import Invocation


def run(invocation: Invocation) -> int:
    """Prints the continuation; Ctrl-C stops it."""
    options = invocation.options
    prompt = sys.stdin.read() if options["prompt"] == "-" else options["prompt"]
    talker = make_talker(invocation)
    said: list[str] = []
    finish: str | None = None
    try:
        for piece in talker.go_on(prompt):
            said.append(piece.text)
            finish = piece.finish or finish
            if not options["json"]:
                print(piece.text, end="", flush=True)
    finally:
        talker.close()
    if options["json"]:
        print(json.dumps({"model": talker.name, "text": "".join(said), "finish_reason": finish}))
    else:
        print()
    return 0
