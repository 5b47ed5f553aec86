"""A small child process for tests of boot and sockets: behaves as its Boot.config (JSON) says."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import time
from typing import Any

import msgspec

from trireme.errors import ModelError
from trireme.transport.process.boot import BootChannel, spawn
from trireme.transport.sockets.names import Connection, Disconnected, Poller, Server
from trireme.transport.wire.columns import pack, pack_ids
from trireme.transport.wire.messages import (
    Boot,
    Call,
    CallReply,
    EngineDown,
    EngineToFront,
    FrontToEngine,
    Hello,
    StepOutputs,
    Submit,
)


def main(channel: BootChannel) -> None:
    orders = msgspec.json.decode(channel.boot.config)
    match orders["do"]:
        case "work":
            for i in range(3):
                channel.progress("load", i + 1, 3)
            channel.ready({"pid": os.getpid(), "stdin": os.read(0, 1).decode()}, [("a", "b", "c")])
            _until_drained(channel, orders)
        case "raise":
            raise ModelError("layer 7 is missing", hint="download the file again")
        case "crash":
            raise ZeroDivisionError("seven by zero")
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "exit":
            raise SystemExit(orders["code"])
        case "close":  # is no longer heard of
            channel.ready({"pid": os.getpid()})
            time.sleep(1.0)
            channel._channel.shutdown(socket.SHUT_WR)
            time.sleep(1000)
        case "parent":  # has a child of its own
            then = msgspec.json.encode({"do": orders.get("then", "work")})
            boot = Boot(orders.get("kind", "worker"), channel.boot.name + ".worker-0", 0, then, b"", "/none")
            grandchild = spawn("tests.procs.fake_child", boot)
            while not grandchild.is_ready:
                grandchild.receive()
                time.sleep(0.01)
            channel.ready({"pid": os.getpid(), "grandchild": grandchild.pid})
            _until_drained(channel, orders)
        case "hold":  # the interpreter, so that no other thread of this process runs
            channel.ready({"pid": os.getpid()})
            ctypes.PyDLL(None).sleep(1000)
        case "beat":
            channel.ready({"pid": os.getpid()})
            for i in range(10_000):
                channel.beat(i)
                if channel.receive():
                    return
                time.sleep(0.02)
        case "serve":
            serve(channel, orders)
        case "connect":
            connect(channel, orders)


def serve(channel: BootChannel, orders: dict[str, Any]) -> None:
    """An engine-like server: answers each Submit with the sum of its prompt, and a few calls."""
    server = Server.open(
        channel.boot, orders.get("socket", "engine-0.front"), FrontToEngine, silence_s=orders.get("silence_s", 15.0)
    )
    events: list[str] = []
    leaving: list[bool] = []

    def on_messages() -> None:
        for peer, message in server.receive():
            match message:
                case Hello() | Disconnected():
                    events.append(f"{type(message).__name__} {peer.name} {getattr(message, 'reason', '')}")
                case Submit():
                    server.send(peer, StepOutputs(0, 1, pack_ids([message.rid]), pack([int(message.prompt.sum())])))
                case Call(method="counts"):
                    server.send(peer, CallReply(message.call_id, True, server.counts()))
                case Call(method="events"):
                    server.send(peer, CallReply(message.call_id, True, events))
                case Call(method="last words"):
                    for i in range(message.args["count"]):
                        server.send(peer, StepOutputs(0, i, pack_ids([i]), pack([i])))
                    server.send(peer, EngineDown(0, "out of oil"))
                    leaving.append(True)

    poller = Poller()
    poller.add(server, on_messages)
    poller.add(channel, lambda: None)
    channel.ready({"pid": os.getpid(), "address": server.address})
    while not channel.receive() and not leaving:
        server.progress += 1
        poller.wait(1.0)
    server.close()


def connect(channel: BootChannel, orders: dict[str, Any]) -> None:
    """A front-end-like client that does nothing but stay connected."""
    link = Connection.open(channel.boot, "engine-0.front", EngineToFront)
    link.wait_up(10.0)
    channel.ready({"pid": os.getpid()})
    poller = Poller()
    poller.add(link, lambda: list(link.receive()) and None)
    poller.add(channel, lambda: None)
    while not channel.receive():
        poller.wait(1.0)


def _until_drained(channel: BootChannel, orders: dict[str, object]) -> None:
    while not (drains := channel.receive()):
        time.sleep(0.01)
    channel.progress(f"drained {drains[0].deadline_s}", 1, 1)
