"""The persistent batch: per-sequence state that a worker keeps between steps, as tables indexed by batch slot.

Owned by workers.cpu.runner; changed only by `apply` with a StepPlan's deltas. Step inputs are gathered from it by
workers.inputs and never alias it. A slot is cleared when a sequence is placed in it; with `poison` a freed slot is filled with
marker values, so that a test detects any read of a freed slot.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from trireme.errors import EngineError
from trireme.params import RowParams
from trireme.transport.wire.columns import Column, unpack
from trireme.transport.wire.messages import NewRow, RowFault, StepPlan
from trireme.workers.logits_processors import LogitRules, Tokens

UNKNOWN = -1  # in `tokens`: sampled on a device, and not known here yet
POISON = -0x0DEADBEE  # an impossible token and block id
ROW_ERRORS = (ArithmeticError, LookupError, MemoryError, RuntimeError, TypeError, ValueError)
"""Errors in the work of a single sequence that become a RowFault."""


class Batch:
    """Tables of `num_rows` batch slots. Tokens and block ids past a sequence's counts are undefined."""

    def __init__(
        self,
        num_rows: int,
        max_len: int,
        block_size: int,
        vocab_size: int,
        num_kv_blocks: int,
        *,
        poison: bool = False,
    ) -> None:
        self.max_len = max_len
        self._num_kv_blocks = num_kv_blocks
        self.block_size = block_size
        self.vocab_size = vocab_size
        self._poison = poison
        self.num_used_blocks = 0  # one more than the highest block that any sequence was ever given
        max_blocks = -(-max_len // block_size) + 1  # a planner may allocate one block ahead
        self.tokens: NDArray[np.int32] = np.zeros((num_rows, max_len), np.int32)
        self.num_tokens: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.num_prompt: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.blocks: NDArray[np.int32] = np.zeros((num_rows, max_blocks), np.int32)
        self.num_blocks: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.choice: NDArray[np.int32] = np.zeros(num_rows, np.int32)
        self.is_plain: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # greedy, no logits processors, no logprobs
        self.has_rules: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)
        self.wants_prompt: NDArray[np.bool_] = np.zeros(num_rows, np.bool_)  # prompt log-probabilities
        self.params: list[RowParams | None] = [None] * num_rows
        self.rules: list[LogitRules | None] = [None] * num_rows
        self.faults: dict[int, str] = {}  # by slot: sequences that cannot be computed (any more), until they are freed

    def apply(self, plan: StepPlan) -> None:
        """Applies freed, new, blocks and sampled tokens. A sequence that cannot be placed enters `faults`; others are unaffected.

        Raises EngineError when the deltas of a valid sequence do not fit: that is a bug of the planner, not of a request.
        """
        for row in plan.freed:
            self._forget(row)
        for new in plan.new:
            self._forget(new.row)
            try:
                self._place(new)
            except ROW_ERRORS as error:
                self._forget(new.row)
                self.faults[new.row] = str(error)
        if plan.grown_rows:
            self._grow(self._sound(plan.grown_rows), unpack(plan.grown_blocks))
        tokens = unpack(plan.tokens)
        if tokens.size and int(tokens.max()) >= 0:
            rows = self._sound(plan.rows)
            gained = tokens >= 0
            if self.faults:
                gained &= ~np.isin(rows, list(self.faults))
            self._append_tokens(rows[gained], tokens[gained])

    def keep_sampled(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        """Stores this worker's own samples as its sequences' next tokens. A slot with token -1 got none: it enters `faults`."""
        failed = tokens < 0
        if failed.any():
            for row in rows[failed].tolist():
                self.faults[row] = "this sequence got no token in an earlier step"
            rows, tokens = rows[~failed], tokens[~failed]
        self._append_tokens(rows, tokens)

    def expect_sampled(self, rows: NDArray[np.int64]) -> None:
        """Counts one more token of each sequence, which is being sampled and is UNKNOWN here until then."""
        self._count_up(rows, np.int32(UNKNOWN))

    def fill_in(self, rows: NDArray[np.int64], at: NDArray[np.int32], tokens: NDArray[np.int32]) -> None:
        """Stores tokens that were expected, at their positions; the slots still hold the requests that sampled them."""
        self.tokens[rows, at] = tokens
        self._tell_rules(rows, tokens)

    def rows_of(self, plan: StepPlan) -> NDArray[np.int64]:
        """The scheduled slots. Raises EngineError when one is outside this batch."""
        return self._sound(plan.rows)

    def row_faults(self, rows: NDArray[np.int64]) -> list[RowFault]:
        """Faults of scheduled sequences that cannot be computed."""
        if not self.faults:
            return []
        return [RowFault(row, self.faults[row]) for row in rows.tolist() if row in self.faults]

    def row_tokens(self, row: int) -> Tokens:
        """All known tokens of the sequence in a slot, without a copy."""
        return self.tokens[row, : self.num_tokens[row]]

    def num_rows(self) -> int:
        """Slots that hold a request."""
        return sum(params is not None for params in self.params)

    def row_params(self, row: int) -> RowParams:
        params = self.params[row]
        if params is None:
            raise EngineError(f"slot {row} is scheduled but holds no sequence")
        return params

    def _forget(self, row: int) -> None:
        self.num_tokens[row] = self.num_prompt[row] = self.num_blocks[row] = self.choice[row] = 0
        self.is_plain[row] = self.wants_prompt[row] = self.has_rules[row] = False
        self.params[row] = self.rules[row] = None
        self.faults.pop(row, None)
        if self._poison:
            self.tokens[row] = self.blocks[row] = POISON

    def _place(self, new: NewRow) -> None:
        row, params = new.row, new.params
        tokens = np.asarray(new.tokens, np.int32)
        if not 0 < tokens.size <= self.max_len:
            raise ValueError(f"{tokens.size} tokens; this worker holds 1..{self.max_len} per sequence")
        low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise ValueError(f"token {wrong} is outside this model's vocabulary 0..{self.vocab_size - 1}")
        needs_rules = LogitRules.needed(params)
        self.rules[row] = LogitRules(params, self.vocab_size, tokens, new.num_prompt) if needs_rules else None
        self.has_rules[row] = needs_rules
        self.tokens[row, : tokens.size] = tokens
        self.num_tokens[row] = tokens.size
        self.num_prompt[row] = new.num_prompt
        self.choice[row] = params.choice
        self.params[row] = params
        self.is_plain[row] = params.is_greedy and not needs_rules and params.logprobs < 0
        self.wants_prompt[row] = params.prompt_logprobs >= 0
        self._append_blocks(row, new.blocks)

    def _append_blocks(self, row: int, blocks: list[int]) -> None:
        start = int(self.num_blocks[row])
        stop = start + len(blocks)
        if stop > self.blocks.shape[1]:
            raise EngineError(f"slot {row} was given {stop} blocks; {self.blocks.shape[1]} hold {self.max_len} tokens")
        if blocks:
            highest = max(blocks)
            if not (min(blocks) >= 0 and highest < self._num_kv_blocks):
                raise EngineError(f"slot {row} was given blocks outside 0..{self._num_kv_blocks - 1}: {blocks}")
            self.num_used_blocks = max(self.num_used_blocks, highest + 1)
        self.blocks[row, start:stop] = blocks
        self.num_blocks[row] = stop

    def _grow(self, rows: NDArray[np.int64], blocks: NDArray[np.int32]) -> None:
        """Appends blocks[i] to the block table of slot rows[i]; a slot may repeat."""
        if self.faults:
            sound = ~np.isin(rows, list(self.faults))
            rows, blocks = rows[sound], blocks[sound]
        if len(set(rows.tolist())) < rows.size:
            for row in dict.fromkeys(rows.tolist()):
                self._append_blocks(row, blocks[rows == row].tolist())
            return
        highest = int(blocks.max(initial=-1))
        if blocks.size and not 0 <= int(blocks.min()) <= highest < self._num_kv_blocks:
            raise EngineError(f"blocks outside 0..{self._num_kv_blocks - 1} were given: {blocks.tolist()[:8]}")
        self.num_used_blocks = max(self.num_used_blocks, highest + 1)
        at = self.num_blocks[rows]
        if int(at.max(initial=0)) >= self.blocks.shape[1]:
            raise EngineError(
                f"a sequence was given more than the {self.blocks.shape[1]} blocks for {self.max_len} tokens"
            )
        self.blocks[rows, at] = blocks
        self.num_blocks[rows] = at + 1

    def _sound(self, column: Column) -> NDArray[np.int64]:
        rows = unpack(column).astype(np.int64)
        if rows.size and not 0 <= int(rows.min()) <= int(rows.max()) < len(self.params):
            raise EngineError(f"a plan names slots outside 0..{len(self.params) - 1}: {rows.tolist()[:8]}")
        return rows

    def _append_tokens(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        self._count_up(rows, tokens)
        self._tell_rules(rows, tokens)

    def _count_up(self, rows: NDArray[np.int64], tokens: NDArray[np.int32] | np.int32) -> None:
        at = self.num_tokens[rows]
        if int(at.max(initial=0)) >= self.max_len:
            raise EngineError(f"a sequence grew past {self.max_len} tokens: slots {rows[at >= self.max_len].tolist()}")
        self.tokens[rows, at] = tokens
        self.num_tokens[rows] = at + 1

    def _tell_rules(self, rows: NDArray[np.int64], tokens: NDArray[np.int32]) -> None:
        if not self.has_rules[rows].any():
            return
        for row, token in zip(rows.tolist(), tokens.tolist(), strict=True):
            rules = self.rules[row]
            if rules is not None:
                rules.add_output(token)
