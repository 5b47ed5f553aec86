"""Draft of one step: collects what the scheduler decides and writes it as a StepPlan, the delta to what workers know.

Filled by the scheduler; kept until the step's result arrives, because it says which request each row was.
"""

from __future__ import annotations

from engine_core.request import Request
from transport.messages import NewRow, StepPlan


class Draft:
    """Rows of one step, as parallel lists, and the blocks that must stay untouched until it is over."""

    __slots__ = (
        "fenced",
        "freed",
        "grown",
        "new",
        "num_computed",
        "num_tokens",
        "requests",
        "rows",
        "sample",
        "step",
        "submitted_s",
        "tokens",
        "total_tokens",
    )

    def __init__(self, step: int, now: float) -> None:
        self.step = step
        self.submitted_s = now
        self.requests: list[Request | None] = []  # None: voided while in flight
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
