"""workers.main with sockets that can be told to do harm, and a sampler that fails on one seed."""

from __future__ import annotations

from typing import Any

import trireme.workers.main as product
from tests.chaos.poison import BAD_SEED
from tests.chaos.wired.sockets import install
from trireme.transport.process.boot import BootChannel
from trireme.workers.sampling.native_sampler import NativeSampler


def main(channel: BootChannel) -> None:
    install(channel.boot)
    sample = NativeSampler.run

    def run(self: NativeSampler, logits: Any, rows: Any, batch: Any) -> Any:
        if any(batch.row_params(row).seed == BAD_SEED for row in rows.tolist()):
            raise RuntimeError("no luck with this seed")
        return sample(self, logits, rows, batch)

    NativeSampler.run = run  # type: ignore[method-assign]
    product.main(channel)
