"""The block table of a sequence, and the hash chain of its content. Held by the sequence, changed by KVCache alone."""

from __future__ import annotations


class BlockTable:
    """Blocks in token order, of which the first `num_adopted` were written by other sequences, or by this one before a
    preemption, and the first `num_sealed` are in the prefix cache's index. `hashes` is the chain over the full blocks hashed so
    far; `salt` enters its first link."""

    __slots__ = ("blocks", "hashes", "num_adopted", "num_sealed", "salt")

    def __init__(self, salt: bytes = b"") -> None:
        self.salt = salt
        self.hashes: list[bytes] = []
        self.blocks: list[int] = []
        self.num_adopted = 0
        self.num_sealed = 0

    def start(self, hits: list[int]) -> None:
        """The empty table begins with matched blocks, which are sealed already."""
        self.blocks = list(hits)
        self.num_adopted = self.num_sealed = len(hits)

    def clear(self) -> None:
        """Holds no block any more. The chain stays: it says what the tokens are, not where."""
        self.blocks = []
        self.num_adopted = self.num_sealed = 0
