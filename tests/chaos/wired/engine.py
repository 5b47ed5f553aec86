"""engine_core.main with sockets that can be told to do harm; so are those of its workers."""

from __future__ import annotations

import engine_core.executor.procs
import engine_core.main as product
from tests.chaos.wired.sockets import install
from transport.boot import BootChannel


def main(channel: BootChannel) -> None:
    install(channel.boot)
    engine_core.executor.procs.WORKER_MODULE = "tests.chaos.wired.worker"
    product.main(channel)
