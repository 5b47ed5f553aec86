"""Address of each named socket of a deployment, and the keys that protect it: ipc in a private directory, or tcp with CURVE.

Used by transport/sockets only. Must never let a socket listen on every interface, nor leave loopback without keys.
"""

from __future__ import annotations

import ipaddress
import os
import threading
from pathlib import Path

import msgspec
import zmq
from zmq.utils import z85

from trireme.errors import ConfigError
from trireme.transport.wire.messages import Boot

MAX_IPC_PATH = 107  # sun_path of a unix socket


class CurveKeys(msgspec.Struct, frozen=True):
    """CURVE key pairs (Z85 text) of one deployment: all bound sides share one, all connecting sides the other."""

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    @classmethod
    def from_boot(cls, boot: Boot) -> CurveKeys | None:
        """None when the deployment uses ipc."""
        return cls(**{name: boot.secret_keys[name] for name in cls.__struct_fields__}) if boot.secret_keys else None


def make_secret_keys() -> dict[str, bytes]:
    """Fresh keys for Boot.secret_keys; a deployment whose Boot has them uses tcp."""
    server_public, server_secret = zmq.curve_keypair()
    client_public, client_secret = zmq.curve_keypair()
    return msgspec.structs.asdict(CurveKeys(server_public, server_secret, client_public, client_secret))


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


def is_same_host(address: str) -> bool:
    """True when both ends of `address` are on this machine and see the same process ids."""
    return not address.startswith("tcp://") or is_loopback(_tcp_host(address))


def check_address(address: str, keys: CurveKeys | None) -> None:
    """Raises ConfigError for a forbidden address."""
    if address.startswith("ipc://"):
        path = address.removeprefix("ipc://")
        if path.startswith("@"):
            raise ConfigError(f"{address}: abstract sockets are open to every user of this machine")
        if len(os.fsencode(path)) > MAX_IPC_PATH:
            raise ConfigError(
                f"the socket path {path} has {len(os.fsencode(path))} bytes; the system allows {MAX_IPC_PATH}",
                hint="set TMPDIR to a shorter directory",
            )
        return
    if not address.startswith("tcp://"):
        raise ConfigError(f"{address} is neither ipc:// nor tcp://")
    host = _tcp_host(address)
    if host in ("*", "0.0.0.0", "::", "[::]"):
        raise ConfigError(f"{address} would listen on every interface", hint="name one address of this machine")
    if keys is None and not is_loopback(host):
        raise ConfigError(f"{address} leaves this machine without CURVE keys")


def bind_address(boot: Boot, socket_name: str) -> str:
    """Address for the bound side. Over tcp the port is chosen by the system: publish the real one with publish_address."""
    if boot.secret_keys:
        return "tcp://127.0.0.1:*"
    return f"ipc://{boot.run_dir}/{socket_name}"


def publish_address(boot: Boot, socket_name: str, address: str) -> None:
    """Atomically writes the address of `socket_name`, for peers that connect over tcp."""
    if boot.secret_keys:
        path = Path(boot.run_dir, f"{socket_name}.address")
        partial = path.with_suffix(".partial")
        partial.write_text(address)
        partial.replace(path)


def connect_address(boot: Boot, socket_name: str) -> str | None:
    """Address for the connecting side; None until the bound side has published one."""
    if not boot.secret_keys:
        return f"ipc://{boot.run_dir}/{socket_name}"
    try:
        return Path(boot.run_dir, f"{socket_name}.address").read_text()
    except FileNotFoundError:
        return None


def guard_server(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    """Makes a socket (alone in its context) reject every peer without the client keys."""
    handler = socket.context.socket(zmq.REP)
    handler.linger = 0
    handler.bind("inproc://zeromq.zap.01")
    allowed = z85.decode(keys.client_public)
    threading.Thread(target=_answer_zap, args=(handler, allowed), name="zap", daemon=True).start()
    socket.curve_server = True
    socket.curve_secretkey = keys.server_secret
    socket.curve_publickey = keys.server_public


def guard_client(socket: zmq.Socket[bytes], keys: CurveKeys) -> None:
    socket.curve_serverkey = keys.server_public
    socket.curve_publickey = keys.client_public
    socket.curve_secretkey = keys.client_secret


def _answer_zap(handler: zmq.Socket[bytes], allowed: bytes) -> None:
    """Answers libzmq's authentication requests (ZAP 1.0, rfc.zeromq.org/spec/27) until the context ends."""
    try:
        while True:
            request = handler.recv_multipart()
            known = len(request) == 7 and request[5] == b"CURVE" and request[6] == allowed
            request_id = request[1] if len(request) > 1 else b""
            status = (b"200", b"OK") if known else (b"400", b"unknown key")
            handler.send_multipart([b"1.0", request_id, *status, b"", b""])
    except zmq.ContextTerminated:
        handler.close()


def _tcp_host(address: str) -> str:
    return address.removeprefix("tcp://").rpartition(":")[0]
