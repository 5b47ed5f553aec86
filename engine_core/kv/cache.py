"""KV memory as requests see it: prefix lookup, allocation, sealing of full blocks, release.

Called by the scheduler in ask-then-act pairs: the questions change nothing, the actions after a yes cannot fail.
Never looks at queues or policies.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from trireme.engine_core.kv.owner import BlockOwner
from trireme.engine_core.kv.pool import BlockPool
from trireme.hashing import ROOT, block_hash, first_extra

Tails: TypeAlias = NDArray[np.int32]


class KVCache:
    """Block tables over one pool. With `prefix_cache` off nothing is hashed or shared."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_cache: bool = True) -> None:
        self.pool = BlockPool(num_blocks)
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.num_queried = 0  # tokens looked up at admission
        self.num_hit = 0  # tokens found

    @property
    def num_available(self) -> int:
        """Blocks that can be taken now."""
        return self.pool.num_available

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, request: BlockOwner) -> list[int]:
        """The blocks of a request's longest cached prefix (a question). Leaves at least one token to compute."""
        if not self.prefix_cache:
            return []
        hits: list[int] = []
        for content in self._hashes(request, request.num_reusable // self.block_size):
            block = self.pool.find(content)
            if block is None:
                break
            hits.append(block)
        return hits

    def num_idle(self, blocks: list[int]) -> int:
        """How many of `blocks` nobody holds: sharing them reduces `num_available`."""
        counts = self.pool.counts
        return sum(1 for block in blocks if counts[block] == 0)

    def adopt(self, request: BlockOwner, hits: list[int]) -> None:
        """Starts the empty block table of a request with matched blocks."""
        for block in hits:
            self.pool.share(block)
        request.table.start(hits)
        request.num_computed = request.capacity = len(hits) * self.block_size
        self.num_queried += request.num_tokens
        self.num_hit += request.num_computed

    def extend(self, request: BlockOwner, num_blocks: int) -> list[int]:
        """Appends fresh blocks to a table and returns them; requires `num_available`."""
        fresh = [self.pool.take() for _ in range(num_blocks)]
        request.table.blocks += fresh
        request.capacity += num_blocks * self.block_size
        return fresh

    def extend_each(self, requests: Iterable[BlockOwner], count: int) -> list[int]:
        """`extend` by one block for each of `count` decoding sequences; the caller updates their capacity."""
        fresh = self.pool.take_many(count)
        for request, block in zip(requests, fresh, strict=True):
            request.table.blocks.append(block)
        return fresh

    def take_tails(self, requests: Iterable[BlockOwner], tails: Tails) -> None:
        """Copies the full rings of newest tokens, `tails`, into their decoding sequences and seals the full blocks."""
        for request, tail in zip(requests, tails, strict=True):
            request.take_tail(tail.tobytes())
            self.seal(request)

    def seal(self, request: BlockOwner) -> None:
        """Makes the blocks that are full of known tokens findable. Any later step may read them, since plans run in order. Called
        when a prompt is planned, periodically while a sequence decodes, and before its blocks are released."""
        if not self.prefix_cache:
            return
        num_full = min(request.num_computed, request.num_tokens) // self.block_size
        hashes, table = self._hashes(request, num_full), request.table
        for i in range(table.num_sealed, num_full):
            self.pool.seal(table.blocks[i], hashes[i])
        table.num_sealed = num_full

    def invalidate(self, contents: list[bytes]) -> None:
        """Removes these contents from the index: the step that should have written them failed."""
        for content in contents:
            block = self.pool.find(content)
            if block is not None:
                self.pool.forget(block)

    def release(self, blocks: list[int]) -> None:
        """Releases a table, tail first, so that prefixes stay cached longest."""
        for block in reversed(blocks):
            self.pool.release(block)

    def work_lost(self, request: BlockOwner) -> int:
        """Computed tokens that preemption would discard: those in blocks that no other sequence holds."""
        counts = self.pool.counts
        num_shared = sum(1 for block in request.table.blocks if counts[block] > 1)
        return max(0, request.num_computed - num_shared * self.block_size)

    def _hashes(self, request: BlockOwner, num_blocks: int) -> list[bytes]:
        """The hash chain over the first `num_blocks` blocks, extended on demand and kept in its table."""
        hashes, size = request.table.hashes, self.block_size
        if len(hashes) < num_blocks:
            tokens = request.tokens
        while len(hashes) < num_blocks:
            i = len(hashes)
            parent, extra = (hashes[-1], ()) if i else (ROOT, first_extra(request.table.salt))
            hashes.append(block_hash(parent, tokens[i * size : (i + 1) * size].tobytes(), extra))
        return hashes if len(hashes) == num_blocks else hashes[:num_blocks]
