"""The connection file that a server leaves in its private directory, so that programs of the same user may join
(launch/api/client.py).

Separate from launch/api/client.py because a server must not import what its clients need before it starts its own parts.
"""

from __future__ import annotations

import os
from pathlib import Path

import msgspec

from trireme.transport.wire.messages import Boot

PASS_NAME = "client.pass"


def write_pass(boot: Boot) -> None:
    """Lets programs of this user join the deployment that `boot` describes. Called by the server once a part runs."""
    path = Path(boot.run_dir, PASS_NAME)
    handle = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(msgspec.msgpack.encode(boot))
