"""How long a front end lets the coordinator choose, when what it chooses cannot be reached."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from types import SimpleNamespace
from typing import Any, cast

import pytest

from trireme.serving.engines import placement
from trireme.serving.engines.placement import Placement
from trireme.transport.wire.messages import Released, Route, Routed


class SlowCoordinator:
    """Names engine 1, which this front end has no link to, just before it would be given up."""

    is_up = True

    def __init__(self, after_s: float) -> None:
        self.after_s = after_s
        self.placement: Placement | None = None
        self.num_asked = self.num_released = 0

    def send(self, message: Any) -> bool:
        if isinstance(message, Released):
            self.num_released += message.count
        elif isinstance(message, Route):
            self.num_asked += 1
            assert self.placement is not None
            answer = Routed(rid=message.rid, engine=1, ticket=self.num_asked, epoch=1)
            asyncio.get_running_loop().call_later(self.after_s, self.placement.on_message, answer)
        return True


def engine(index: int, *, is_up: bool) -> Any:
    return SimpleNamespace(index=index, is_up=is_up, welcome=None, lost_epoch=0, stalled=False, reason="no link yet")


@pytest.mark.parametrize(("asking_s", "num_asked"), [(0.95, 2), (0.1, 1), (60.0, 3)])
def test_a_choice_that_cannot_be_reached_is_made_alone_in_time(
    monkeypatch: pytest.MonkeyPatch, asking_s: float, num_asked: int
) -> None:
    """A third of the time, the same order: an answer takes 0.3 s, a link is waited for 0.33 s."""
    monkeypatch.setattr(placement, "ROUTE_TIMEOUT_S", 0.33)
    monkeypatch.setattr(placement, "LINK_WAIT_S", 0.33)
    monkeypatch.setattr(placement, "ASKING_S", asking_s)
    coordinator = SlowCoordinator(0.3)

    async def place() -> tuple[Any, int]:
        engines = [engine(0, is_up=True), engine(1, is_up=False)]
        mine = Placement(engines, itertools.count(1), time.monotonic, is_coordinated=True, rng=random.Random(1))
        mine.coordinator, coordinator.placement = cast(Any, coordinator), mine
        return await mine.place_once(Route(rid=0, num_tokens=4))

    chosen, ticket = asyncio.run(place())
    assert (chosen.index, ticket) == (0, 0)
    assert coordinator.num_asked == coordinator.num_released == num_asked


def test_the_limit_is_below_that_of_a_request_without_coordinator() -> None:
    assert placement.ASKING_S + placement.ROUTE_TIMEOUT_S + placement.LINK_WAIT_S < 5.0
