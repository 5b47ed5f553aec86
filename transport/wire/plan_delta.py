"""Delta encoding of steps: a StepPlan as the difference to the previous one (NextToken), and back.

Called by the engine's executor and by worker processes. Pure: both sides hold the previous plan.
"""

from __future__ import annotations

from trireme.errors import ProtocolError
from trireme.transport.wire.columns import Column, repeated, unpack
from trireme.transport.wire.messages import NextToken, StepPlan


def shortened(before: StepPlan | None, plan: StepPlan) -> NextToken | None:
    """`plan` as a NextToken after `before`, or None where that cannot express it. A decode step over an unchanged batch can."""
    if (
        before is None
        or plan.freed
        or plan.new
        or plan.copies
        or plan.ballot is not None
        or plan.step != before.step + 1
        or plan.rows != before.rows
        or plan.sample != before.sample
        or 0 in plan.sample
        or plan.num_tokens != repeated(1, len(plan.sample))
        or plan.num_computed != _ends_of(before)
    ):
        return None
    tokens = b"" if plan.tokens == before.tokens else plan.tokens
    return NextToken(plan.step, plan.grown_rows, plan.grown_blocks, tokens)


def next_plan(before: StepPlan, step: NextToken) -> StepPlan:
    """The plan that `step` encodes. Raises ProtocolError when it does not follow `before`."""
    if step.step != before.step + 1 or len(step.tokens) not in (0, len(before.rows)):
        raise ProtocolError(
            f"step {step.step} with {len(step.tokens) // 4} tokens does not follow step {before.step} "
            f"of {len(before.rows) // 4} sequences"
        )
    return StepPlan(
        step=step.step,
        freed=[],
        new=[],
        grown_rows=step.grown_rows,
        grown_blocks=step.grown_blocks,
        copies=[],
        rows=before.rows,
        num_tokens=repeated(1, len(before.sample)),
        num_computed=_ends_of(before),
        tokens=step.tokens or before.tokens,
        sample=before.sample,
    )


def _ends_of(plan: StepPlan) -> Column:
    """Position of each sequence after the plan."""
    return (unpack(plan.num_computed) + unpack(plan.num_tokens)).tobytes()
