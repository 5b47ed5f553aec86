"""A small child process for tests of boot, sockets and the supervisor: behaves as its Boot.config (JSON) says."""

from __future__ import annotations

import os
import signal
import time

import msgspec

from transport.boot import BootChannel, spawn
from transport.messages import Boot
from trireme.errors import ModelError


def main(channel: BootChannel) -> None:
    orders = msgspec.json.decode(channel.boot.config)
    match orders["do"]:
        case "work":
            for i in range(3):
                channel.progress("load", i + 1, 3)
            channel.ready({"pid": os.getpid(), "stdin": os.read(0, 1).decode()}, {"load": 0.5}, [("a", "b", "c")])
            _until_drained(channel, orders)
        case "raise":
            raise ModelError("layer 7 is missing", hint="download the file again")
        case "crash":
            raise ZeroDivisionError("seven by zero")
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            raise SystemExit(orders["code"])
        case "parent":  # has a child of its own
            boot = Boot("worker", channel.boot.name + ".worker-0", 0, msgspec.json.encode({"do": "work"}), b"", "/none")
            grandchild = spawn("tests.procs.fake_child", boot)
            while not grandchild.is_ready:
                grandchild.receive()
                time.sleep(0.01)
            channel.ready({"pid": os.getpid(), "grandchild": grandchild.pid})
            _until_drained(channel, orders)
        case "beat":
            channel.ready({"pid": os.getpid()})
            for i in range(10_000):
                channel.beat(i)
                if channel.receive():
                    return
                time.sleep(0.02)


def _until_drained(channel: BootChannel, orders: dict[str, object]) -> None:
    while not (drains := channel.receive()):
        time.sleep(0.01)
    channel.progress(f"drained {drains[0].deadline_s}", 1, 1)
