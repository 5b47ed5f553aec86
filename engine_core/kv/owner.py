"""What the KV cache needs from the sequence that owns a block table, so that it does not depend on the scheduler."""

from __future__ import annotations

from array import array
from typing import Protocol

from trireme.engine_core.kv.table import BlockTable


class BlockOwner(Protocol):
    """A sequence with a block table. Counts are in tokens."""

    table: BlockTable

    @property
    def tokens(self) -> array[int]: ...

    @property
    def num_tokens(self) -> int: ...

    @property
    def num_computed(self) -> int: ...

    @num_computed.setter
    def num_computed(self, value: int) -> None: ...

    @property
    def capacity(self) -> int: ...

    @capacity.setter
    def capacity(self, value: int) -> None: ...

    @property
    def num_reusable(self) -> int:
        """Leading tokens whose KV may come from the prefix cache."""
        ...

    def take_tail(self, tail: bytes) -> None:
        """Appends to the known tokens so that they end with `tail`."""
        ...
