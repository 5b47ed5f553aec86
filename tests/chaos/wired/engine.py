"""engine_core.main with sockets that can be told to do harm; so are those of its workers."""

from __future__ import annotations

import trireme.engine_core.executor.procs
import trireme.engine_core.main as product
from tests.chaos.wired.sockets import install
from trireme.transport.process.boot import BootChannel


def main(channel: BootChannel) -> None:
    install(channel.boot)
    trireme.engine_core.executor.procs.WORKER_MODULE = "tests.chaos.wired.worker"
    product.main(channel)
