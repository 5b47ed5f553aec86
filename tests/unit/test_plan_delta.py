"""Steps that only carry on: what is sent as NextToken comes out as the plan that was meant, and nothing else is shortened."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.models.rows import new_row, plan_of
from tests.unit.engine_driver import Driver
from trireme.errors import ProtocolError
from trireme.params import RowParams
from trireme.transport.wire.codec import decode, encode
from trireme.transport.wire.columns import pack, unpack
from trireme.transport.wire.messages import CoreToWorker, NextToken, StepPlan
from trireme.transport.wire.plan_delta import next_plan, shortened


def decode_step(step: int, computed: list[int], **changes: object) -> StepPlan:
    columns: dict[str, object] = {"rows": list(range(len(computed))), "num_computed": computed}
    return plan_of(step=step, **{**columns, **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize("ahead", [False, True])
def test_all_plans_of_an_engine_survive_being_shortened(ahead: bool) -> None:
    driver = Driver(ahead=ahead)
    for length in (3, 9, 14):
        driver.submit(length, max_tokens=20)
    driver.run()
    before, num_short = None, 0
    for plan in driver.plans:
        short = shortened(before, plan)
        if short is not None:
            num_short += 1
            assert before is not None
            assert next_plan(before, decode(encode(short), CoreToWorker)) == plan
        before = plan
    assert num_short > 12


def test_a_steady_step_takes_a_few_bytes_however_many_rows_there_are() -> None:
    plans = [decode_step(step, [100 + step] * 1000) for step in (7, 8)]
    short = shortened(*plans)
    assert short is not None
    assert len(encode(short)[0]) < 30


@pytest.mark.parametrize(
    "after",
    [
        decode_step(9, [6, 10]),  # a step between
        decode_step(8, [6, 11]),
        decode_step(8, [6, 10], num_tokens=[1, 2]),
        decode_step(8, [6, 10], sample=[True, False]),
        decode_step(8, [6, 10], rows=[1, 0]),
        decode_step(8, [6]),
        decode_step(8, [6, 10], freed=[3]),
        decode_step(8, [6, 10], copies=[(1, 2)]),
        decode_step(8, [6, 10], new=[new_row(4, [1], RowParams(4))]),
    ],
)
def test_whatever_else_a_step_does_is_sent_in_full(after: StepPlan) -> None:
    before = decode_step(7, [5, 9])
    assert shortened(before, decode_step(8, [6, 10], tokens=[4, 5], blocks=[(1, [7])])) is not None
    assert shortened(before, after) is None
    assert shortened(None, after) is None


@given(st.integers(-3, 20), st.lists(st.integers(-(2**31), 2**31 - 1), max_size=4))
def test_a_step_that_does_not_follow_is_a_protocol_error(step: int, tokens: list[int]) -> None:
    before = decode_step(7, [5, 9])
    message = NextToken(step, tokens=pack(tokens))
    if step == 8 and len(tokens) in (0, 2):
        plan = next_plan(before, message)
        assert unpack(plan.num_computed).tolist() == [6, 10]
        assert unpack(plan.tokens).tolist() == (tokens or [-1, -1])
        return
    with pytest.raises(ProtocolError, match="does not follow"):
        next_plan(before, message)


def test_messages_are_equal_to_themselves() -> None:
    """What the other tests rely on when they compare plans."""
    plan = decode_step(1, [1])
    assert msgspec.structs.replace(plan, step=1) == plan
    assert msgspec.structs.replace(plan, step=2) != plan
