"""Builds a HostBatch from the persistent batch and a step's columns, vectorized, into preallocated buffers.

Called by workers.cpu.runner. The arrays it returns are views of its buffers and are invalidated by the next build.

    seq r of R:   |<- num_computed[r] ->|<- num_tokens[r]: this step ->|
                  0                     positions ...                   context_len[r]
    flat T:       query_start[r] .. query_start[r + 1]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from trireme.errors import EngineError
from trireme.models.forward import HostBatch
from trireme.workers.batch import Batch

Column = NDArray[np.int32]


@dataclass(slots=True)
class StepRows:
    """The scheduled sequences of one forward, as columns of R entries."""

    rows: NDArray[np.int64]
    num_tokens: Column
    num_computed: Column
    sample: NDArray[np.bool_]

    def where(self, mask: NDArray[np.bool_]) -> StepRows:
        """The sequences selected by `mask`."""
        return StepRows(self.rows[mask], self.num_tokens[mask], self.num_computed[mask], self.sample[mask])


@dataclass(slots=True)
class Wanted:
    """Owners of the S logits; S rises with T, so a sampling sequence's is the last of its own.

    prompt holds (slot, first position, positions, first index into S): they predict the tokens at position + 1.
    """

    sampling: NDArray[np.int64]  # batch slots
    sampling_at: NDArray[np.int64] | None  # their indices into S; None: all of S, in order
    prompt: list[tuple[int, int, int, int]]


class _Buffer:
    """An int32 array that grows by doubling. Decode steps repeat a size: its slice is cached."""

    def __init__(self, size: int) -> None:
        self._array: Column = np.zeros(max(size, 1), np.int32)
        self._taken = self._array

    def take(self, size: int) -> Column:
        """The first `size` entries; their contents are undefined."""
        if size == self._taken.size:
            return self._taken
        if size > self._array.size:
            self._array = np.zeros(2 * size, np.int32)
        self._taken = self._array[:size]
        return self._taken

    def put(self, values: NDArray[Any]) -> Column:
        array = self.take(values.size)
        array[:] = values
        return array


class InputBuilder:
    """Reusable buffers of one worker's step inputs."""

    def __init__(self, max_tokens: int, max_rows: int, max_blocks: int) -> None:
        self._token_ids, self._positions, self._slots = (_Buffer(max_tokens) for _ in range(3))
        self._query_start, self._context_len, self._choices, self._num_prompt = (
            _Buffer(max_rows + 1) for _ in range(4)
        )
        self._logits_index = _Buffer(max_rows)
        self._block_table = _Buffer(max_rows * min(max_blocks, 64))
        self._counting = np.arange(max(max_tokens, max_rows) + 1, dtype=np.int32)

    def build(self, batch: Batch, step: StepRows) -> tuple[HostBatch, Wanted]:
        """Inputs of one forward. Raises EngineError when a sequence lacks the tokens or blocks that the plan relies on."""
        rows, count = step.rows, step.rows.size
        context = step.num_computed + step.num_tokens
        check_rows(batch, step, context)
        starts = self._query_start.take(count + 1)
        starts[0] = 0
        np.cumsum(step.num_tokens, out=starts[1:])
        if int(starts[-1]) == count:
            owner, positions = rows, step.num_computed
        else:
            owner, positions = self._spread(step, starts)
        index, wanted = self._wanted(batch, step, starts)
        forward = HostBatch(
            token_ids=self._token_ids.put(batch.tokens[owner, positions]),
            positions=self._positions.put(positions),
            slots=self._slots.put(slot_values(batch, owner, positions)),
            query_start=starts,
            context_len=self._context_len.put(context),
            block_table=self._gather_blocks(batch, rows, context),
            logits_index=self._logits_index.put(index),
            choices=self._choices.put(batch.choice[rows]),
            num_prompt=self._num_prompt.put(batch.num_prompt[rows]),
        )
        return forward, wanted

    def _spread(self, step: StepRows, starts: Column) -> tuple[NDArray[np.int64], Column]:
        """Per token: its batch slot and its position."""
        positions = self._count_to(int(starts[-1])) + np.repeat(step.num_computed - starts[:-1], step.num_tokens)
        return np.repeat(step.rows, step.num_tokens), positions

    def _gather_blocks(self, batch: Batch, rows: NDArray[np.int64], context: Column) -> NDArray[np.int32]:
        """Block table [R, B], B just long enough for the longest context; entries past a sequence's own are 0."""
        width = -(-int(context.max()) // batch.block_size)
        table = self._block_table.take(rows.size * width).reshape(rows.size, width)
        np.take(batch.blocks[:, :width], rows, axis=0, out=table)
        np.copyto(table, 0, where=self._count_to(width) >= batch.num_blocks[rows][:, None])
        return table

    def _count_to(self, width: int) -> Column:
        """0, 1, ... width - 1."""
        if width > self._counting.size:
            self._counting = np.arange(2 * width, dtype=np.int32)
        return self._counting[:width]

    def _wanted(self, batch: Batch, step: StepRows, starts: Column) -> tuple[Column, Wanted]:
        """Flat indices whose logits are needed, ascending, and their owners."""
        last = starts[1:][step.sample] - np.int32(1)
        sampling = step.rows[step.sample]
        scoring = np.flatnonzero(batch.wants_prompt[step.rows])
        if not scoring.size:
            return last, Wanted(sampling, None, [])
        stops = np.minimum(step.num_computed + step.num_tokens, batch.num_prompt[step.rows] - 1)
        spans = [(i, int(step.num_computed[i]), int(stops[i] - step.num_computed[i])) for i in scoring.tolist()]
        spans = [span for span in spans if span[2] > 0]
        parts = [last, *(starts[i] + np.arange(count, dtype=np.int32) for i, _, count in spans)]
        index = np.sort(np.concatenate(parts))
        prompt = [
            (int(step.rows[i]), first, count, int(np.searchsorted(index, starts[i]))) for i, first, count in spans
        ]
        return index, Wanted(sampling, np.searchsorted(index, last), prompt)


def check_rows(batch: Batch, step: StepRows, context: Column) -> None:
    """The only bounds check before the kernels: no access outside a sequence's own tokens and blocks."""
    known, room = batch.num_tokens[step.rows], batch.num_blocks[step.rows] * batch.block_size
    bad = (context > known) | (context > room) | (step.num_tokens < 1) | (step.num_computed < 0)
    if bad.any():
        i = int(bad.argmax())
        raise EngineError(
            f"slot {step.rows[i]} is planned for tokens {step.num_computed[i]}..{context[i]} "
            f"but has {known[i]} tokens and blocks for {room[i]}"
        )


def slot_values(batch: Batch, owner: NDArray[np.int64], positions: Column) -> Column:
    """KV slots of the tokens at `positions` of batch slots `owner`: block * block_size + offset."""
    block, offset = np.divmod(positions, np.int32(batch.block_size))
    return batch.blocks[owner, block] * np.int32(batch.block_size) + offset
