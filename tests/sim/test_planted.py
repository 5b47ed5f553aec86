"""The checks can fail: each of these faults, planted in the product's own code, is found within the stated number of seeds."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.sim.world import run_seed
from trireme.coordinator.core import Coordinator
from trireme.coordinator.ledger import Ledger
from trireme.engine_core.core import EngineCore
from trireme.engine_core.health import HealthCheck
from trireme.engine_core.kv.cache import KVCache
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.fallback_router import FallbackRouter
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.stream import Stream
from trireme.transport.sockets.framing import Disconnected
from trireme.transport.wire.messages import Submit

Planter = Callable[[pytest.MonkeyPatch], None]
FIRST_SEED = 100_000


def a_ledger_that_forgets_a_ticket(patch: pytest.MonkeyPatch) -> None:
    give = Ledger.give

    def forgetful(self: Ledger, front: str, engine: int, *args: Any) -> int:
        number = give(self, front, engine, *args)
        if number % 4 == 3:
            self.release(front, engine, 1)
        return number

    patch.setattr(Ledger, "give", forgetful)


def a_ledger_whose_sums_drift(patch: pytest.MonkeyPatch) -> None:
    settle = Ledger._settle

    def drifting(self: Ledger, engine: int, ticket: Any) -> None:
        settle(self, engine, ticket)
        self._sums[engine].num_tokens += ticket.num_rows > 1

    patch.setattr(Ledger, "_settle", drifting)


def a_late_report_that_erases_a_fresh_decision(patch: pytest.MonkeyPatch) -> None:
    def erasing(self: Ledger, engine: int, admitted: dict[str, int]) -> None:
        self.forget_engine(engine)

    patch.setattr(Ledger, "admit", erasing)


def a_coordinator_that_ignores_the_loss_of_an_engine(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "engine_lost", lambda self, engine, epoch, reason: None)
    patch.setattr(Coordinator, "engine_connected", lambda self, engine, epoch: epoch or _connect(self, engine))


def _connect(core: Coordinator, engine: int) -> None:
    core.members.connected(engine, 0)


def a_block_not_freed_on_abort(patch: pytest.MonkeyPatch) -> None:
    abort = EngineCore.abort

    def leaking(self: EngineCore, front: str, rids: Iterable[int]) -> None:
        for rid in rids:
            request = self.requests.get((front, rid))
            if request is not None and request.table.blocks:
                request.table.blocks.pop()
        abort(self, front, list(rids))

    patch.setattr(EngineCore, "abort", leaking)


def an_engine_that_keeps_the_rows_of_a_dead_front_end(patch: pytest.MonkeyPatch) -> None:
    def keeping(self: EngineCore, front: str) -> None:
        for request in [row for row in self.requests.values() if row.front == front and row.row < 0]:
            self._end(request, "abort")
        self.outbox.drop(front)

    patch.setattr(EngineCore, "front_gone", keeping)


def a_double_end(patch: pytest.MonkeyPatch) -> None:
    end = EngineCore._end

    def twice(self: EngineCore, request: Any, reason: Any, **details: Any) -> None:
        end(self, request, reason, **details)
        if request.rid % 5 == 0:
            ends = self.outbox.to(request.front).ends
            ends.append(ends[-1])

    patch.setattr(EngineCore, "_end", twice)


def a_dropped_output(patch: pytest.MonkeyPatch) -> None:
    take = EngineCore.take_outputs

    def dropping(self: EngineCore) -> dict[str, Any]:
        found = take(self)
        return {} if self.scheduler.completed % 16 == 15 else found

    patch.setattr(EngineCore, "take_outputs", dropping)


def a_token_repeated_after_a_move(patch: pytest.MonkeyPatch) -> None:
    submit = Replay.submit

    def short(self: Replay, rid: int, ticket: int = 0, *, passed_s: float = 0.0, waited_s: float = 0.0) -> Submit:
        found = submit(self, rid, ticket, passed_s=passed_s, waited_s=waited_s)
        if found.num_replayed < 2:
            return found
        return _replace(found, prompt=found.prompt[:-1], num_replayed=found.num_replayed - 1)

    patch.setattr(Replay, "submit", short)


def a_deadline_that_nobody_keeps(patch: pytest.MonkeyPatch) -> None:
    submit = Replay.submit

    def timeless(self: Replay, rid: int, ticket: int = 0, *, passed_s: float = 0.0, waited_s: float = 0.0) -> Submit:
        return _replace(submit(self, rid, ticket, passed_s=passed_s, waited_s=waited_s), total_s=0.0)

    patch.setattr(Replay, "submit", timeless)
    patch.setattr(Stream, "fail_after", lambda self, seconds, error: None)


def a_deadline_that_starts_before_its_request(patch: pytest.MonkeyPatch) -> None:
    submit = Replay.submit

    def early(self: Replay, rid: int, ticket: int = 0, *, passed_s: float = 0.0, waited_s: float = 0.0) -> Submit:
        return submit(self, rid, ticket, passed_s=passed_s + self.total_s / 2, waited_s=waited_s)

    patch.setattr(Replay, "submit", early)


def _replace(message: Any, **changes: Any) -> Any:
    values = {name: getattr(message, name) for name in message.__struct_fields__}
    return type(message)(**{**values, **changes})


def a_client_deaf_to_the_loss_of_an_engine(patch: pytest.MonkeyPatch) -> None:
    listen = EngineClient._on_engine

    def deaf(self: EngineClient, engine: Any, message: Any) -> None:
        if isinstance(message, Disconnected):
            engine.welcome = None
        else:
            listen(self, engine, message)

    patch.setattr(EngineClient, "_on_engine", deaf)


def streams_that_notice_the_loss_of_the_coordinator(patch: pytest.MonkeyPatch) -> None:
    listen = EngineClient._on_coordinator

    def noticing(self: EngineClient, message: Any) -> None:
        listen(self, message)
        if isinstance(message, Disconnected):
            self.end_all("the coordinator is away")

    patch.setattr(EngineClient, "_on_coordinator", noticing)


def a_gauge_that_is_not_taken_back(patch: pytest.MonkeyPatch) -> None:
    ended = FallbackRouter.ended
    patch.setattr(FallbackRouter, "ended", lambda self, engine, num_choices=1: ended(self, engine, min(1, num_choices)))


def a_prefix_trusted_although_its_step_failed(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(KVCache, "invalidate", lambda self, contents: None)


def an_engine_that_never_gives_up_a_stuck_step(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HealthCheck, "look", lambda self, now, *, is_awake: None)


PLANTED: list[tuple[Planter, int, str]] = [
    (a_ledger_that_forgets_a_ticket, 60, "ledger"),
    (a_ledger_whose_sums_drift, 60, "ledger"),
    (a_late_report_that_erases_a_fresh_decision, 60, "ledger"),
    (a_coordinator_that_ignores_the_loss_of_an_engine, 200, ""),
    (a_block_not_freed_on_abort, 60, ""),
    (an_engine_that_keeps_the_rows_of_a_dead_front_end, 200, ""),
    (a_double_end, 20, "R1"),
    (a_dropped_output, 60, ""),
    (a_token_repeated_after_a_move, 100, "tokens"),
    (a_deadline_that_nobody_keeps, 200, "R13"),
    (a_deadline_that_starts_before_its_request, 200, "R1"),
    (a_client_deaf_to_the_loss_of_an_engine, 60, "R1"),
    (streams_that_notice_the_loss_of_the_coordinator, 200, "R1"),
    (a_gauge_that_is_not_taken_back, 100, "R20"),
    (a_prefix_trusted_although_its_step_failed, 300, "tokens"),
    (an_engine_that_never_gives_up_a_stuck_step, 200, ""),
]


@pytest.mark.parametrize(("plant", "most", "promise"), PLANTED, ids=[plant.__name__ for plant, _, _ in PLANTED])
def test_a_planted_fault_is_found(
    plant: Planter, most: int, promise: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logging.disable(logging.CRITICAL)
    plant(monkeypatch)
    try:
        found = next(result for seed in range(FIRST_SEED, FIRST_SEED + most) if (result := run_seed(seed)).breach)
    finally:
        logging.disable(logging.NOTSET)
    with capsys.disabled():
        print(f"\n  {plant.__name__}: after {found.seed - FIRST_SEED + 1} of {most} seeds: {found.breach:.90}")
    assert found.breach.startswith(promise)
    assert "TypeError" not in found.breach, "the fault itself does not fit what it replaces"
