"""Mutated frames at every socket of a running deployment: `python -m tests.e2e.frames --count 100000`.

Every message there is, whole and broken in random ways, goes to each engine's and the coordinator's socket, from peers that said
Hello and from some that did not; random bytes to the sockets of numbers; broken HTTP to the port. One seed is one run.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import re
import socket
import tempfile
import typing
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import psutil
import zmq

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_tiny_llama
from trireme.errors import ProtocolError, TriremeError
from trireme.launch.api.client import read_pass
from trireme.params import RowParams
from trireme.transport.process.rundir import LOCK_NAME
from trireme.transport.wire import messages
from trireme.transport.wire.codec import encode
from trireme.transport.wire.messages import Hello, Wire

FLAGS = ("--served-name", "tiny", "--worker", "fake", "--dp", "2", "--api-servers", "2")
SAMPLES: dict[Any, Any] = {
    int: 3,
    float: 0.5,
    str: "x",
    bytes: b"abcd",
    bool: True,
    np.ndarray: np.arange(3, dtype=np.int32),
    RowParams: RowParams(max_tokens=2),
}


GREETINGS = (
    b"",
    b"\xff" + bytes(8) + b"\x7f\x03\x00CURVE".ljust(23, b"\0"),
    b"\xff" + bytes(8) + b"\x7f\x01",
    b"GET / HTTP/1.1\r\n",
)


def noise(dice: random.Random) -> bytes:
    return dice.randbytes(dice.choice((0, 1, 7, 64, 1000, 20_000)))


def sample(kind: type[Wire], dice: random.Random) -> Wire | None:
    """A message of this kind, with values that are likely to hurt; None where none can be made."""
    values = {}
    for field in msgspec.structs.fields(kind):
        known = SAMPLES.get(field.type)
        if field.type is int:
            known = dice.choice((0, 1, -1, 7, 2**31, 2**63 - 1, -(2**63)))
        elif field.type is float:
            known = dice.choice((0.0, 1e308, float("nan"), float("inf"), -1.0))
        if known is not None and (field.required or dice.random() < 0.5):
            values[field.name] = known
        elif field.required:
            origin = typing.get_origin(field.type)
            values[field.name] = {list: [], dict: {}, tuple: ()}.get(origin, dice.choice((b"", "", 0, [], {})))
    try:
        return kind(**values)
    except (TypeError, ValueError, TriremeError):
        return None


def kinds() -> list[type[Wire]]:
    return [
        kind
        for kind in vars(messages).values()
        if isinstance(kind, type) and issubclass(kind, Wire) and kind is not Wire
    ]


def frames_of(dice: random.Random) -> list[bytes]:
    """Frames of some message, whole or mutated."""
    message = sample(dice.choice(kinds()), dice)
    try:
        frames = [bytes(frame) for frame in encode(message)] if message is not None else [b"\x93"]
    except ProtocolError:  # a value that our own side would not send
        frames = [dice.randbytes(20)]
    body = bytearray(frames[0])
    for _ in range(dice.choice((0, 0, 1, 1, 2, 8))):
        if body:
            at = dice.randrange(len(body))
            change = dice.randrange(4)
            if change == 0:
                body[at] = dice.randrange(256)
            elif change == 1:
                del body[at:]
            elif change == 2:
                body[at:at] = dice.randbytes(dice.randrange(1, 9))
            else:
                body[at] ^= 1 << dice.randrange(8)
    extra = [dice.randbytes(dice.randrange(40)) for _ in range(dice.choice((0, 0, 0, 1, 70)))]
    return [bytes(body), *frames[1:], *extra]


class Attacker:
    """One socket to one address; a new one now and then, since the server may have closed its ear to the old one."""

    def __init__(self, path: Path, hello: Hello) -> None:
        self._path, self._hello = path, hello
        self._socket: zmq.Socket[bytes] | None = None
        self._sequence = 0

    def send(self, dice: random.Random) -> None:
        if self._socket is None or dice.random() < 0.01:
            self.close()
            self._socket = zmq.Context.instance().socket(zmq.DEALER)
            self._socket.linger = self._socket.sndtimeo = 20_000  # every frame gets there
            self._socket.connect(f"ipc://{self._path}")
            self._sequence = 0
            if dice.random() < 0.8:
                self._say([bytes(frame) for frame in encode(self._hello)])
        if dice.random() < 0.05:
            self._socket.send_multipart([dice.randbytes(dice.randrange(60)) for _ in range(dice.randrange(1, 4))])
        else:
            self._say(frames_of(dice))

    def _say(self, frames: list[bytes]) -> None:
        assert self._socket is not None
        self._socket.send_multipart([self._sequence.to_bytes(4, "little") + frames[0], *frames[1:]])
        self._sequence += 1

    def close(self) -> None:
        if self._socket is not None:
            self._socket.close()


def to_stream(family: int, address: Any, data: bytes) -> None:
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as one:
        one.settimeout(1)
        one.connect(address)
        one.sendall(data)


def http_bytes(dice: random.Random) -> bytes:
    body = b'{"prompt": "x", "max_tokens": 2}'
    whole = bytearray(
        b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: %d\r\n\r\n" % len(body) + body
    )
    for _ in range(dice.randrange(1, 6)):
        whole[dice.randrange(len(whole))] = dice.randrange(256)
    return bytes(whole)


def attack(deployment: Deployment, run_dir: Path, count: int, seed: int) -> int:
    """Sends `count` frames; returns how many sockets they went to."""
    boot = read_pass(run_dir)
    dice = random.Random(seed)
    sockets = [path for path in sorted(run_dir.iterdir()) if path.is_socket()]
    plain = [path for path in sockets if path.name.endswith(".stats")]
    attackers = []
    for path in sockets:
        if path not in plain:
            role: Any = "engine" if path.name == "coordinator" and dice.random() < 0.5 else "front"
            hello = Hello(messages.PROTOCOL_VERSION, boot.config_hash, role, f"stranger-{path.name}", 0, os.getpid())
            attackers.append(Attacker(path, hello))
    for number in range(count):
        if number % 50 == 0 and plain:
            to_stream(socket.AF_UNIX, str(dice.choice(plain)), dice.randbytes(dice.randrange(200)))
        elif number % 50 == 1:
            to_stream(socket.AF_INET, ("127.0.0.1", deployment.port), http_bytes(dice))
        else:
            dice.choice(attackers).send(dice)
    for attacker in attackers:
        attacker.close()
    return len(sockets) + 1


def run(count: int, seed: int) -> str:
    """Starts a deployment, attacks it, and checks that the frames were heard, that every process lives and answers, and that
    nothing of the strangers stays behind. Raises AssertionError."""
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "tiny")
        with Deployment(model, *FLAGS) as deployment:
            before = deployment.family()
            num_sockets = attack(deployment, run_dir_of(deployment), count, seed)
            heard = wait_for(
                lambda: heard_by(deployment), 30, "malformed frames in the log of every engine and the coordinator"
            )
            check_alive(deployment, before)
            wait_for(lambda: is_quiet(deployment), 60, "no row and no block left behind by strangers")
            dropped = ", ".join(f"{process} dropped {number}" for process, number in sorted(heard.items()))
            return f"{count} frames at {num_sockets} sockets, seed {seed}: {len(before)} processes live; {dropped}"


def run_tcp(count: int, seed: int) -> str:
    """The same deployment over tcp: bytes of any kind at every port that a process listens on. Raises AssertionError."""
    dice = random.Random(seed)
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "tiny")
        with Deployment(model, *FLAGS, "--transport", "tcp") as deployment:
            before = deployment.family()
            ports = sorted({each.laddr.port for each in listening(deployment)} - {deployment.port})
            assert ports
            for _ in range(count):
                to_stream(socket.AF_INET, ("127.0.0.1", dice.choice(ports)), dice.choice(GREETINGS) + noise(dice))
            check_alive(deployment, before)
            return f"{count} greetings at {len(ports)} tcp ports, seed {seed}: {len(before)} processes live"


def check_alive(deployment: Deployment, before: dict[int, str]) -> None:
    body = {"model": "tiny", "prompt": "x", "max_tokens": 4, "ignore_eos": True}
    for _ in range(8):
        assert deployment.post("/v1/completions", body)["usage"]["completion_tokens"] == 4
    died = before.keys() - deployment.family().keys()
    assert not died, f"died: {[before[pid] for pid in died]}"


def heard_by(deployment: Deployment) -> dict[str, int]:
    """Frames that each process has dropped, by its own last word; empty until each of them has dropped some."""
    found = {}
    for process, number in re.findall(r"(\S+) +dropped a malformed message from=.*? count=(\d+)", deployment.output()):
        found[process] = int(number)
    return found if {"engine-0", "engine-1", "coordinator"} <= found.keys() else {}


def is_quiet(deployment: Deployment) -> bool:
    rows = deployment.metric("trireme_requests_running") + deployment.metric("trireme_requests_waiting")
    return deployment.metric("trireme_kv_blocks", state="owned") == 0 and rows == 0


def listening(deployment: Deployment) -> list[Any]:
    """Every inet socket that a process of the deployment accepts anything on."""
    return [
        connection
        for pid in [deployment.process.pid, *deployment.family()]
        for connection in psutil.Process(pid).net_connections(kind="inet")
        if connection.status in (psutil.CONN_LISTEN, psutil.CONN_NONE)
    ]


def run_dir_of(deployment: Deployment) -> Path:
    """The directory whose lock file the supervisor holds open."""
    held = {os.path.realpath(link) for link in Path(f"/proc/{deployment.process.pid}/fd").iterdir()}
    (lock,) = [path for path in held if path.endswith("/" + LOCK_NAME)]
    return Path(lock).parent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    print(run(options.count, options.seed))
    print(run_tcp(options.count // 100, options.seed))


if __name__ == "__main__":
    main()
