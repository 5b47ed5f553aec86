"""The engine process: every topology gives the same tokens, and everything that dies is noticed, explained and cleaned up."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.procs.engine_process import Engine, Row, make_config, write_fake_model
from tests.procs.undying import undying
from trireme.transport.wire.messages import Drain, Progress

Start = Callable[..., Engine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    engines: list[Engine] = []

    def make(fake: dict[str, Any] | None = None, *, wait: bool = True, **config: Any) -> Engine:
        model = write_fake_model(tmp_path / f"fake-{len(engines)}", **(fake or {}))
        engines.append(Engine(make_config(model, **config), wait=wait))
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return [(seed * 31 + 7 * i) % 250 for i in range(length)]


def is_quiet(stats: dict[str, Any]) -> bool:
    blocks = stats["blocks_free"] + stats["blocks_cached"]
    return stats["num_running"] == stats["num_waiting"] == 0 and blocks == stats["num_blocks"]


@pytest.mark.parametrize(
    "topology",
    [
        {"executor": "inproc"},
        {"executor": "procs"},
        {"tp": 2},
        {"pp": 2},
        {"tp": 2, "pp": 2},
    ],
    ids=["inproc", "procs", "tp2", "pp2", "tp2xpp2"],
)
def test_every_topology_gives_the_solo_tokens(start: Start, topology: dict[str, Any]) -> None:
    engine = start(**topology, chunk=16)
    front, other = engine.front(), engine.front("front-1")
    rows = [front.submit(prompt(5 + 9 * i, i % 3), 10) for i in range(6)]
    more = [other.submit(prompt(8 + 9 * i, i % 3), 12) for i in range(6)]
    front.wait_ends(*rows, *more)
    for row in (*rows, *more):
        assert row.tokens == engine.solo(row)
        assert row.ends[0].reason == "length"
        assert len(row.firsts) == 1
    stats = front.stats()
    assert is_quiet(stats)
    assert stats["submitted"] == stats["length"] == 12
    assert front.call("audit").ok
    workers = front.call("workers")
    assert [info["steps"] for info in workers.result] == [stats["steps"]] * len(workers.result)
    assert len(workers.result) == topology.get("tp", 1) * topology.get("pp", 1)


def test_ready_tells_facts_phases_and_decisions(start: Start) -> None:
    engine = start({"load_ms": 30}, executor="procs")
    assert engine.ready.facts["num_blocks"] == 256
    assert engine.ready.phases["load"] >= 0.03
    assert "kv" in [what for what, _, _ in engine.ready.decisions]
    assert any(isinstance(report, Progress) and report.phase == "load" for report in engine.reports)
    facts = engine.front().welcomes[0].facts
    assert facts is not None
    assert (facts.max_len, facts.vocab_size) == (200, 320)


def test_an_engine_process_holds_no_torch(start: Start) -> None:
    engine = start(executor="inproc")
    maps = Path(f"/proc/{engine.child.pid}/maps").read_text()
    assert "torch" not in maps


def test_a_row_fault_ends_that_row_only(start: Start) -> None:
    engine = start({"row_fault_token": 300}, tp=2)
    front = engine.front()
    bad, good = front.submit([1, 2, 300, 4]), front.submit(prompt(9))
    front.wait_ends(bad, good)
    assert bad.ends[0].error_code == "engine_error"
    assert good.tokens == engine.solo(good)


def test_a_hostile_submit_ends_that_row_only(start: Start) -> None:
    engine = start()
    front = engine.front()
    bad = [front.submit([1, 999]), front.submit([]), front.submit(prompt(500))]
    bad.append(front.submit([1], 4, min_tokens=9))
    good = front.submit(prompt(9))
    front.wait_ends(*bad, good)
    codes = [row.ends[0].error_code for row in bad]
    assert codes == ["invalid_value", "invalid_value", "context_length_exceeded", "invalid_value"]
    assert good.tokens == engine.solo(good)


@pytest.mark.parametrize("topology", [{"executor": "inproc"}, {"tp": 2, "pp": 2}], ids=["inproc", "tp2xpp2"])
def test_o21_abort_storms_leave_nothing(start: Start, topology: dict[str, Any]) -> None:
    engine = start({"delay_ms": 1}, **topology, max_waiting=200)
    front = engine.front()
    for burst in range(6):
        rows = [front.submit(prompt(5 + i, i), 150) for i in range(50)]
        if burst % 2:
            engine.until(lambda rows=rows: any(row.tokens for row in rows), what="a first token")  # type: ignore[misc]
        front.abort(*rows)
    gone = engine.front("front-1")
    lost = [gone.submit(prompt(20, i), 150) for i in range(20)]
    engine.until(lambda: any(row.tokens for row in lost), what="a first token of the other front end")
    gone.close()
    engine.until(lambda: is_quiet(front.stats()), 3.0, "all rows and blocks back")
    assert all(row.ends[0].reason == "abort" for row in front.rows.values())
    last = front.submit(prompt(9))
    front.wait_ends(last)
    assert last.tokens == engine.solo(last)


def test_a_killed_front_end_loses_its_rows_within_a_second(start: Start) -> None:
    import subprocess
    import sys

    engine = start({"delay_ms": 2})
    code = (
        "import sys, msgspec, numpy as np\n"
        "from trireme.transport.wire.messages import Boot, EngineToFront, Submit\n"
        "from trireme.transport.sockets.names import Connection\n"
        "from trireme.params import RowParams\n"
        "boot = msgspec.msgpack.decode(bytes.fromhex(sys.argv[1]), type=Boot)\n"
        "connection = Connection.open(boot, 'engine-0.front', EngineToFront)\n"
        "connection.wait_up(20.0)\n"
        "for rid in range(20): connection.send(Submit(rid, np.arange(9, dtype=np.int32), RowParams(190)))\n"
        "import time; time.sleep(60)\n"
    )
    import msgspec

    boot = msgspec.structs.replace(engine.boot, role="front", name="front-9")
    other = subprocess.Popen([sys.executable, "-c", code, msgspec.msgpack.encode(boot).hex()])
    front = engine.front()
    try:
        engine.until(lambda: front.stats()["num_running"] > 0, what="rows of the other front end")
    finally:
        other.send_signal(signal.SIGKILL)
        other.wait()
    engine.until(lambda: is_quiet(front.stats()), 1.5, "rows of the dead front end to end")


@pytest.mark.parametrize("rank", [0, 3])
def test_o24_a_killed_worker_ends_its_engine_with_the_cause(start: Start, rank: int) -> None:
    engine = start({"delay_ms": 5}, tp=2, pp=2)
    front = engine.front()
    row = front.submit(prompt(9), 150)
    engine.until(lambda: len(row.tokens) > 3, what="tokens")
    killed = time.monotonic()
    os.kill(engine.worker_pids[rank], signal.SIGKILL)
    engine.until(lambda: bool(front.downs), 5.0, "EngineDown")
    assert f"engine-0.worker-{rank} was killed by SIGKILL" in front.downs[0].error
    engine.wait_dead()
    assert time.monotonic() - killed < 5.0
    assert f"engine-0.worker-{rank} was killed by SIGKILL" in engine.failed.error
    engine.restart()
    engine.until(lambda: len(front.welcomes) == 2, what="the next life's welcome")
    assert front.welcomes[1].epoch == 1
    again = front.submit(prompt(9), 10)
    front.wait_ends(again)
    assert again.tokens == engine.solo(again)


@pytest.mark.parametrize("topology", [{"executor": "inproc"}, {"tp": 2}], ids=["inproc", "tp2"])
def test_a_crash_inside_a_step_reports_the_workers_own_exception(start: Start, topology: dict[str, Any]) -> None:
    engine = start({"crash_token": 301}, **topology)
    front = engine.front()
    front.submit([1, 2, 301])
    engine.until(lambda: bool(front.downs), 10.0, "EngineDown")
    assert "scripted crash in slot 0" in front.downs[0].error
    engine.wait_dead()
    assert "scripted crash in slot 0" in engine.failed.error
    assert "workers/fake.py" in engine.failed.traceback


@pytest.mark.parametrize("topology", [{"executor": "inproc"}, {"pp": 2}], ids=["inproc", "pp2"])
def test_a_failed_load_reports_its_cause(start: Start, topology: dict[str, Any]) -> None:
    engine = start({"fail_load": "the weights are made of cheese"}, **topology, wait=False)
    engine.until(lambda: engine.child.is_dead, 30.0, "death")
    assert "the weights are made of cheese" in engine.failed.error
    assert engine.failed.hint == "remove fail_load from config.json"


def test_a_stuck_worker_is_noticed(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = start({"hang_token": 302}, executor="procs")
    front = engine.front()
    first = front.submit(prompt(4))
    front.wait_ends(first)
    row = front.submit([1, 302])
    engine.until(lambda: bool(front.downs), 10.0, "EngineDown")
    assert "a worker is stuck" in front.downs[0].error
    assert not row.tokens
    engine.wait_dead()


def test_o24_nothing_survives_a_killed_engine(start: Start) -> None:
    engine = start({"delay_ms": 5}, tp=2, pp=2)
    front = engine.front()
    row = front.submit(prompt(9), 150)
    engine.until(lambda: bool(row.tokens), what="a token")
    os.kill(engine.child.pid, signal.SIGKILL)
    engine.wait_dead(5.0)
    engine.until(lambda: bool(front.lefts), 2.0, "the front end to notice")


def test_a_worker_that_the_system_keeps_does_not_keep_the_engine(start: Start) -> None:
    """It is given up after the step time-out, and the engine goes without it."""
    engine = start({"delay_ms": 10}, tp=2)
    front = engine.front()
    row = front.submit(prompt(9), 150)
    engine.until(lambda: bool(row.tokens), what="a token")
    victim = engine.worker_pids[1]
    with undying(victim):
        os.kill(victim, signal.SIGKILL)
        began = time.monotonic()
        engine.until(lambda: engine.child.is_dead, 15.0, "the end of the engine")
        assert time.monotonic() - began < 5.0 + 3.0
        assert "worker-1 is stopped" in engine.failed.error
    engine.wait_dead(5.0)


def test_drain_finishes_what_runs_and_refuses_what_comes(start: Start) -> None:
    engine = start({"delay_ms": 10})
    front = engine.front()
    row = front.submit(prompt(9), 40)
    engine.until(lambda: bool(row.tokens), what="a token")
    engine.drain(Drain(10.0))
    time.sleep(0.1)
    late = front.submit(prompt(5))
    front.wait_ends(row, late)
    assert row.tokens == engine.solo(row)
    assert late.ends[0].error_code == "overloaded"
    engine.wait_dead(5.0)
    assert engine.child.exit_code == 0


def test_drain_ends_at_its_deadline_with_an_explicit_word(start: Start) -> None:
    engine = start({"delay_ms": 50})
    front = engine.front()
    row: Row = front.submit(prompt(9), 190)
    engine.until(lambda: bool(row.tokens), what="a token")
    engine.drain(Drain(0.3))
    engine.until(lambda: bool(front.downs), 5.0, "EngineDown")
    assert "shut down" in front.downs[0].error
    engine.wait_dead(5.0)


def test_too_little_memory_names_what_would_fit(start: Start) -> None:
    engine = start({"free_bytes": 4096 * 10}, wait=False)
    engine.close()
    model = write_fake_model(Path(engine.config.model.model), free_bytes=4096 * 10)
    config = make_config(model)
    import msgspec

    config = msgspec.structs.replace(config, cache=msgspec.structs.replace(config.cache, num_blocks=None))
    poor = Engine(config, wait=False)
    try:
        poor.until(lambda: poor.child.is_dead, 30.0, "death")
        assert poor.failed.exit_code == 2
        assert "one request of 200 tokens needs" in poor.failed.error
        assert "--max-len 40" in poor.failed.hint
    finally:
        poor.close()
