"""PendingStep: collects the scheduler's decisions for one step and encodes them as a StepPlan, the delta to the workers' state.

Filled by the scheduler; kept until the step's result arrives, because it maps each batch slot to its request.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import NamedTuple

import numpy as np

from trireme.engine_core.scheduling.decode_batch import DecodeBatch, Ints
from trireme.engine_core.scheduling.request import Request
from trireme.step_time import StepShape
from trireme.transport.wire.columns import Column, pack, pack_flags, repeated
from trireme.transport.wire.messages import NewRow, StepPlan

NO_TOKENS: Ints = np.zeros(0, np.int32)


class Chunk(NamedTuple):
    """Known tokens of one sequence that a step computes."""

    request: Request
    row: int
    num_tokens: int
    num_computed: int
    sample: bool  # the last of them yields a new token


class PlannedTokens(NamedTuple):
    """What a pending step planned for one sequence."""

    request: Request
    num_computed: int
    sample: bool


class PendingStep:
    """Sequences of one step, and the blocks that must stay untouched until it is over.

    First come the sequences of `decode_batch`, each computing the one token at `at`, then `chunks`.
    """

    __slots__ = (
        "at",
        "bound_s",
        "chunks",
        "decode_batch",
        "dropped",
        "fenced",
        "freed",
        "grown_blocks",
        "grown_rows",
        "new",
        "placed",
        "planned_s",
        "started_s",
        "step",
        "tokens",
        "total_tokens",
    )

    def __init__(self, step: int, now: float) -> None:
        self.step = step
        self.planned_s = now
        self.started_s = now  # when it became the oldest step in flight, or was planned
        self.bound_s = inf  # seconds that its decoding sequences may wait for its prompt tokens
        self.decode_batch: DecodeBatch | None = None
        self.at = NO_TOKENS
        self.tokens: Column = b""  # of the decode batch, as sent in the plan
        self.chunks: list[Chunk] = []
        self.dropped: set[int] = set()  # slots whose sequences have ended or lost them since: their answers are ignored
        self.freed: list[int] = []
        self.new: list[NewRow] = []
        self.placed: list[Request] = []  # of the new sequences, those that never had a slot before
        self.grown_rows: list[int] = []
        self.grown_blocks: list[int] = []
        self.fenced: list[int] = []  # blocks of sequences that ended while this step was in flight
        self.total_tokens = 0

    def __len__(self) -> int:
        return len(self.at) + len(self.chunks)

    def decode(self, decode_batch: DecodeBatch, at: Ints, tokens: Column) -> None:
        """Starts the pending step with decoding sequences that have blocks for one more token."""
        self.decode_batch, self.at, self.tokens = decode_batch, at, tokens
        self.total_tokens = len(decode_batch)

    def add(self, request: Request, num_tokens: int, *, sample: bool) -> None:
        """Plans the next `num_tokens` known tokens of a request that has blocks for them."""
        self.chunks.append(Chunk(request, request.row, num_tokens, request.num_computed, sample))
        self.total_tokens += num_tokens
        request.num_computed += num_tokens
        request.last_step = self.step

    def grow(self, row: int, blocks: list[int]) -> None:
        """Appends blocks to the sequence in a batch slot."""
        self.grown_rows += [row] * len(blocks)
        self.grown_blocks += blocks

    def place(self, request: Request) -> None:
        """A sequence new to the workers (or back after preemption), with all its known tokens."""
        self.new.append(
            NewRow(request.row, request.token_array(), request.num_prompt, request.params, list(request.table.blocks))
        )

    # ------------------------------------------------------------ questions

    def asking_rows(self) -> Column:
        """The slots that sample, in order."""
        decoding = b"" if self.decode_batch is None else self.decode_batch.rows
        if not self.chunks:
            return decoding
        return decoding + pack([chunk.row for chunk in self.chunks if chunk.sample])

    def asks(self, row: int) -> bool:
        """True when the sequence will get a token from this step."""
        if row in self.dropped:
            return False
        decodes = self.decode_batch is not None and row in self.decode_batch.slots
        return decodes or any(chunk.row == row and chunk.sample for chunk in self.chunks)

    def requests(self) -> Iterator[Request]:
        """All requests of the step."""
        if self.decode_batch is not None:
            yield from self.decode_batch.requests
        yield from (chunk.request for chunk in self.chunks)

    def shape(self) -> StepShape:
        """What the step computes."""
        shape = StepShape(len(self.at), int(self.at.sum()))
        for chunk in self.chunks:
            shape = shape.plus(chunk.num_tokens, chunk.num_computed)
        return shape

    def places(self) -> dict[int, PlannedTokens]:
        """What is planned, by slot. For rare cases: it walks all sequences."""
        found: dict[int, PlannedTokens] = {}
        if self.decode_batch is not None:
            columns = zip(self.decode_batch.slots.tolist(), self.decode_batch.requests, self.at.tolist(), strict=True)
            found = {row: PlannedTokens(request, at, True) for row, request, at in columns}
        for chunk in self.chunks:
            found[chunk.row] = PlannedTokens(chunk.request, chunk.num_computed, chunk.sample)
        return found

    def to_message(self) -> StepPlan:
        """Encodes the plan. Columns of an unchanged decode batch are the same objects in every step."""
        count, chunks = len(self.at), self.chunks
        rows = b"" if self.decode_batch is None else self.decode_batch.rows
        num_tokens, num_computed = repeated(1, count), self.at.tobytes()
        tokens, sample = self.tokens, b"\1" * count
        if chunks:
            rows += pack([chunk.row for chunk in chunks])
            num_tokens += pack([chunk.num_tokens for chunk in chunks])
            num_computed += pack([chunk.num_computed for chunk in chunks])
            tokens += repeated(-1, len(chunks))
            sample += pack_flags([chunk.sample for chunk in chunks])
        return StepPlan(
            step=self.step,
            freed=self.freed,
            new=self.new,
            grown_rows=pack(self.grown_rows),
            grown_blocks=pack(self.grown_blocks),
            copies=[],
            rows=rows,
            num_tokens=num_tokens,
            num_computed=num_computed,
            tokens=tokens,
            sample=sample,
        )
