"""Short ways to write NewRow and StepPlan in tests of the worker side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trireme.params import RowParams
from trireme.transport.wire.columns import pack, pack_flags, unpack
from trireme.transport.wire.messages import NewRow, StepPlan, StepResult


def new_row(
    row: int, tokens: Sequence[int], params: RowParams, *, num_prompt: int | None = None, blocks: Sequence[int] = ()
) -> NewRow:
    """A NewRow; all tokens are prompt unless `num_prompt` says less."""
    return NewRow(row, np.array(tokens, np.int32), len(tokens) if num_prompt is None else num_prompt, params, [*blocks])


def rows_and_tokens(result: StepResult) -> tuple[list[int], list[int]]:
    """The rows that sampled and what, as lists."""
    return unpack(result.rows).tolist(), unpack(result.tokens).tolist()


def plan_of(
    *,
    step: int = 1,
    freed: Sequence[int] = (),
    new: Sequence[NewRow] = (),
    blocks: Sequence[tuple[int, list[int]]] = (),
    copies: Sequence[tuple[int, int]] = (),
    rows: Sequence[int] = (),
    num_tokens: Sequence[int] | None = None,
    num_computed: Sequence[int] | None = None,
    tokens: Sequence[int] | None = None,
    sample: Sequence[bool] | None = None,
) -> StepPlan:
    """A StepPlan; columns not given are 1 token, 0 computed, no new token, sampling."""
    count = len(rows)
    return StepPlan(
        step,
        [*freed],
        [*new],
        pack([row for row, more in blocks for _ in more]),
        pack([block for _, more in blocks for block in more]),
        [*copies],
        pack([*rows]),
        pack([1] * count if num_tokens is None else [*num_tokens]),
        pack([0] * count if num_computed is None else [*num_computed]),
        pack([-1] * count if tokens is None else [*tokens]),
        pack_flags([True] * count if sample is None else [*sample]),
    )
