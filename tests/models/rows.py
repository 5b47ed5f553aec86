"""Short ways to write NewRow and StepPlan in tests of the worker side."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from transport.messages import NewRow, StepPlan
from trireme.params import RowParams


def new_row(
    row: int, tokens: Sequence[int], params: RowParams, *, num_prompt: int | None = None, blocks: Sequence[int] = ()
) -> NewRow:
    """A NewRow; all tokens are prompt unless `num_prompt` says less."""
    return NewRow(row, np.array(tokens, np.int32), len(tokens) if num_prompt is None else num_prompt, params, [*blocks])


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
        [*blocks],
        [*copies],
        [*rows],
        [1] * count if num_tokens is None else [*num_tokens],
        [0] * count if num_computed is None else [*num_computed],
        [-1] * count if tokens is None else [*tokens],
        [True] * count if sample is None else [*sample],
    )
