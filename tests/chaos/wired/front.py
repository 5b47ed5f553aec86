"""serving.main with sockets that can be told to do harm."""

from __future__ import annotations

import trireme.serving.main as product
from tests.chaos.wired.sockets import install
from trireme.transport.process.boot import BootChannel


def main(channel: BootChannel) -> None:
    install(channel.boot)
    product.main(channel)
