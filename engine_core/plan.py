"""Draft of one step: collects what the scheduler decides and writes it as a StepPlan, the delta to what workers know.

Filled by the scheduler; kept until the step's result arrives, because it says which request each row was.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine_core.columns import Cohort
from engine_core.request import Request
from transport.messages import NewRow, StepPlan


class Draft:
    """Rows of one step, as parallel lists, and the blocks that must stay untouched until it is over.

    The first entries are `cohort`, each computing the one token at `at`; the others compute (parts of) known tokens.
    """

    __slots__ = (
        "at",
        "cohort",
        "dropped",
        "fenced",
        "freed",
        "grown",
        "new",
        "num_computed",
        "num_tokens",
        "requests",
        "rows",
        "sample",
        "started_s",
        "step",
        "tokens",
        "total_tokens",
    )

    def __init__(self, step: int, now: float) -> None:
        self.step = step
        self.started_s = now  # when it became the oldest step in flight, or was planned
        self.cohort: Cohort | None = None
        self.at: NDArray[np.int64] = np.zeros(0, np.int64)
        self.dropped: set[int] = (
            set()
        )  # slots of rows that ended or lost their place since: their answers count for nothing
        self.requests: list[Request] = []
        self.rows: list[int] = []
        self.num_tokens: list[int] = []
        self.num_computed: list[int] = []
        self.tokens: list[int] = []
        self.sample: list[bool] = []
        self.freed: list[int] = []
        self.new: list[NewRow] = []
        self.grown: list[tuple[int, list[int]]] = []
        self.fenced: list[int] = []  # blocks of rows that ended while this step was in flight
        self.total_tokens = 0

    def decode(self, cohort: Cohort, at: NDArray[np.int64], tokens: list[int]) -> None:
        """Starts the draft with decoding rows, which have blocks for one more token."""
        count = len(cohort)
        self.cohort, self.at = cohort, at
        self.requests = list(cohort.requests)
        self.rows, self.num_computed, self.tokens = cohort.slots.tolist(), at.tolist(), tokens
        self.num_tokens, self.sample = [1] * count, [True] * count
        self.total_tokens = count

    def add(self, request: Request, num_tokens: int, *, sample: bool) -> None:
        """Plans the next `num_tokens` tokens, which the workers know, of a request that has blocks for them."""
        self.requests.append(request)
        self.rows.append(request.row)
        self.num_tokens.append(num_tokens)
        self.num_computed.append(request.num_computed)
        self.tokens.append(-1)
        self.sample.append(sample)
        self.total_tokens += num_tokens
        request.num_computed += num_tokens
        request.last_step = self.step

    def asking_rows(self) -> list[int]:
        """The rows that sample, in order."""
        if all(self.sample):
            return self.rows
        return [row for row, sample in zip(self.rows, self.sample, strict=True) if sample]

    def asks(self, row: int) -> bool:
        """True when the row will get a token out of this step."""
        return row not in self.dropped and row in self.rows and self.sample[self.rows.index(row)]

    def place(self, request: Request) -> None:
        """A row new to the workers (or back after preemption), with everything known of it."""
        self.new.append(
            NewRow(request.row, request.token_array(), request.num_prompt, request.params, list(request.blocks))
        )

    def to_message(self) -> StepPlan:
        return StepPlan(
            step=self.step,
            freed=self.freed,
            new=self.new,
            blocks=self.grown,
            copies=[],
            rows=self.rows,
            num_tokens=self.num_tokens,
            num_computed=self.num_computed,
            tokens=self.tokens,
            sample=self.sample,
        )
