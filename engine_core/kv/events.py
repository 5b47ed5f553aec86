"""Changes of a block pool's prefix index since the last report, for the coordinator's prefix index.

Written by kv.blocks, read by the loop. Keeps the difference between the reported and the actual index: a block that comes and
goes between two reports is never reported. So its size is bounded by the pool, however slow the reader, and a restart is one more
difference.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice

from trireme.hashing import packed_keys
from trireme.transport.wire.messages import KVEvents

MAX_KEYS = 8192  # per report


class BlockLog:
    """`index` is the pool's own: content to block. At first nothing has been reported."""

    def __init__(self, index: Mapping[bytes, int]) -> None:
        self._index = index
        self._changes: dict[bytes, bool] = {}  # content -> True: present and unreported; False: reported and gone
        self._seq = 0
        self._is_reset = True
        self.restart()

    def __len__(self) -> int:
        """Blocks that the next reports will contain."""
        return len(self._changes)

    @property
    def is_due(self) -> bool:
        return bool(self._changes) or self._is_reset

    def stored(self, content: bytes) -> None:
        """The content became findable."""
        if self._changes.pop(content, None) is None:
            self._changes[content] = True

    def removed(self, content: bytes) -> None:
        """The content is no longer findable."""
        if self._changes.pop(content, None) is None:
            self._changes[content] = False

    def restart(self) -> None:
        """The reader knows nothing (it is new, or missed a report): the next reports list the whole index."""
        self._changes = dict.fromkeys(self._index, True)
        self._is_reset = True

    def take(self, engine: int, epoch: int, num_blocks: int, limit: int = MAX_KEYS) -> KVEvents:
        """The next report. Ask `is_due` first; a full listing may take several."""
        changes = list(islice(self._changes.items(), limit))
        for content, _ in changes:
            del self._changes[content]
        self._seq += 1
        report = KVEvents(
            engine,
            epoch,
            self._seq,
            packed_keys(content for content, is_there in changes if is_there),
            packed_keys(content for content, is_there in changes if not is_there),
            num_blocks,
            self._is_reset,
        )
        self._is_reset = False
        return report
