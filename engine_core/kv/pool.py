"""The block pool: reference counts of KV blocks, the free list, and cached blocks kept for their content.

Called by kv.cache alone. All operations O(1). A block is in exactly one place: held (count > 0), cached (count 0, content
known, evictable in least-recently-used order), or free (count 0, content worthless).
"""

from __future__ import annotations

from collections import OrderedDict

from trireme.engine_core.kv.events import BlockLog
from trireme.errors import EngineError


class BlockPool:
    """`num_blocks` blocks with reference counts and a hash index of sealed content."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.counts = [0] * num_blocks
        self.hash_of: list[bytes | None] = [None] * num_blocks
        self.index: dict[bytes, int] = {}
        self.free = list(range(num_blocks - 1, -1, -1))  # a stack: block 0 is taken first
        self.cached: OrderedDict[int, None] = OrderedDict()  # oldest first
        self.log: BlockLog | None = None  # changes of the index, when a reader wants them

    @property
    def num_available(self) -> int:
        """Blocks that `take` can hand out: free ones and cached ones."""
        return len(self.free) + len(self.cached)

    def take(self) -> int:
        """A block for new content, held once. Ask `num_available` first; evicts the oldest cached block if none is free."""
        if self.free:
            block = self.free.pop()
        elif self.cached:
            block, _ = self.cached.popitem(last=False)
            self._unindex(block)
        else:
            raise EngineError(f"no block left of {self.num_blocks}: the scheduler did not ask before it took one")
        self.counts[block] = 1
        return block

    def take_many(self, count: int) -> list[int]:
        """`take`, `count` times."""
        if len(self.free) < count:
            return [self.take() for _ in range(count)]
        start = len(self.free) - count
        fresh = self.free[start:]
        del self.free[start:]
        fresh.reverse()
        counts = self.counts
        for block in fresh:
            counts[block] = 1
        return fresh

    def share(self, block: int) -> None:
        """Adds a holder to a block with known content; a cached block is no longer evictable."""
        if self.counts[block] == 0:
            del self.cached[block]
        self.counts[block] += 1

    def release(self, block: int) -> None:
        """Removes a holder. After the last one the block is cached if its content is known, else free."""
        count = self.counts[block] - 1
        if count < 0:
            raise EngineError(f"block {block} released more often than held")
        self.counts[block] = count
        if count == 0:
            if self.hash_of[block] is None:
                self.free.append(block)
            else:
                self.cached[block] = None

    def seal(self, block: int, content: bytes) -> None:
        """Makes a held, full block findable. If equal content is already indexed, this copy stays anonymous."""
        if content not in self.index:
            self.index[content] = block
            self.hash_of[block] = content
            if self.log is not None:
                self.log.stored(content)

    def find(self, content: bytes) -> int | None:
        return self.index.get(content)

    def forget(self, block: int) -> None:
        """Removes a block whose content is invalid from the index."""
        self._unindex(block)
        if self.counts[block] == 0 and block in self.cached:
            del self.cached[block]
            self.free.append(block)

    def forget_all(self) -> None:
        """Empties the index; cached blocks become free, held ones stay held."""
        for block in list(self.index.values()):
            self._unindex(block)
        self.free.extend(self.cached)
        self.cached.clear()

    def _unindex(self, block: int) -> None:
        content = self.hash_of[block]
        if content is not None:
            del self.index[content]
            self.hash_of[block] = None
            if self.log is not None:
                self.log.removed(content)
