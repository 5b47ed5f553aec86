"""The life cycle of a row, the queue and the policies."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from trireme.engine_core.scheduling.policies.base import POLICIES, PolicySettings
from trireme.engine_core.scheduling.request import TRANSITIONS, Request, State
from trireme.engine_core.scheduling.waiting import WaitingQueue
from trireme.errors import EngineError
from trireme.params import RowParams
from trireme.transport.wire.messages import Submit


def make_request(arrival: int, num_tokens: int = 3) -> Request:
    submit = Submit(arrival, np.arange(num_tokens, dtype=np.int32), RowParams(max_tokens=4))
    return Request("front", submit, arrival, 0.0, 64)


@pytest.mark.parametrize(("old", "new"), list(itertools.product(State, State)))
def test_only_the_table_allows_a_change(old: State, new: State) -> None:
    request = make_request(1)
    request.state = old
    if (old, new) in TRANSITIONS:
        request.move(new)
        assert request.state is new
    else:
        with pytest.raises(EngineError, match=f"{old.value} to {new.value}"):
            request.move(new)
        assert request.state is old


def test_every_state_but_the_last_leads_on_and_ended_is_final() -> None:
    leaving = {old for old, _ in TRANSITIONS}
    assert leaving == set(State) - {State.ENDED}


def test_prompt_and_replayed_tokens_are_told_apart() -> None:
    submit = Submit(1, np.arange(10, dtype=np.int32), RowParams(max_tokens=8), num_replayed=3)
    request = Request("front", submit, 1, 0.0, 64)
    assert (request.num_prompt, request.num_output, request.limit) == (7, 3, 15)


def test_the_queue_keeps_order_through_random_pushes_and_removals() -> None:
    dice = random.Random(5)
    queue = WaitingQueue(POLICIES.find("fcfs")(PolicySettings()))
    live: dict[int, Request] = {}
    for arrival in range(2000):
        live[arrival] = make_request(arrival, 1 + arrival % 5)
        queue.push(live[arrival])
        while live and dice.random() < 0.52:
            victim = live.pop(dice.choice(list(live)))
            queue.discard(victim)
            if dice.random() < 0.2:
                live[victim.arrival] = victim
                queue.push(victim)
        head = queue.peek()
        assert (head.arrival if head else None) == min(live, default=None)
        assert len(queue) == len(live)
        assert queue.num_tokens == sum(len(row.tokens) for row in live.values())
    assert sum(len(lane._heap) for lane in queue._lanes.values()) <= 2 * len(live) + 65


def test_the_victim_loses_least_and_among_equals_came_last() -> None:
    a, b, c = make_request(1), make_request(2), make_request(3)
    lost = {a: 10, b: 4, c: 4}
    policy = POLICIES.find("fcfs")(PolicySettings())
    assert policy.victim([a, b, c], lost.__getitem__) is c
    lost[b] = 3
    assert policy.victim([a, b, c], lost.__getitem__) is b
