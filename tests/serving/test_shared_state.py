"""What front ends share in files: accounts that are exact over processes, room that all fill together, counters that never fall."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serving.deployment import Served, serve
from tests.serving.engines import FakeEngine, words
from trireme.config import ServingConfig
from trireme.errors import OverloadedError
from trireme.serving.admission.accounts import NUM_WAYS, SharedQuotas
from trireme.serving.admission.admission import Admission, Caller
from trireme.serving.admission.concurrency import AdaptiveLimit
from trireme.serving.admission.occupancy import STALE_S, Occupancy
from trireme.serving.admission.quota import Quota, Rates
from trireme.serving.metrics.aggregation import Aggregation
from trireme.serving.metrics.telemetry import ENGINE_COUNTERS, Telemetry, merged
from trireme.serving.metrics.totals import EngineTotals
from trireme.serving.shared_state import open_shared_state

ROOT = Path(__file__).resolve().parents[2]
TEXT = {"model": "stub", "prompt": "hello", "max_tokens": 4}

# ---------------------------------------------------------------- accounts

acts = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(("admit", "tokens", "headers")), st.floats(0, 25), st.integers(0, 90)),
    max_size=60,
)


@settings(max_examples=60, deadline=None)
@given(acts, st.sampled_from((Rates(5, 0), Rates(0, 60), Rates(7, 300))))
def test_three_front_ends_keep_one_account(
    tmp_path_factory: pytest.TempPathFactory, acts: list[tuple[int, str, float, int]], rates: Rates
) -> None:
    """Whichever of them is asked, the answer is that of one account in one process; another caller's is another one."""
    path = tmp_path_factory.mktemp("accounts") / "callers"
    fronts = [SharedQuotas(path) for _ in range(3)]
    alone, now = Quota(rates), 1000.0
    for front, act, gap_s, count in acts:
        now += gap_s
        shared = fronts[front].of(b"ann", rates)
        assert shared is not None
        if act == "admit":
            assert shared.admit(now) == pytest.approx(alone.admit(now))
        elif act == "tokens":
            shared.take_tokens(now, count)
            alone.take_tokens(now, count)
        assert shared.headers(now) == alone.headers(now)
    other = fronts[0].of(b"bob", rates)
    assert other is not None
    assert other.headers(now) == Quota(rates).headers(now)
    assert fronts[0].of(b"ann", Rates()) is None
    for each in fronts:
        each.close()


def test_processes_at_the_same_moment_let_in_no_more_and_no_less(tmp_path: Path) -> None:
    """Four processes that ask as fast as they can: the limit is met exactly."""
    script = (
        "import sys, time\n"
        "from trireme.serving.admission.accounts import SharedQuotas\n"
        "from trireme.serving.admission.quota import Rates\n"
        "account = SharedQuotas(sys.argv[1]).of(b'ann', Rates(400, 0))\n"
        "print('ready', flush=True); sys.stdin.readline()\n"
        "print(sum(account.admit(time.monotonic()) is None for _ in range(300)))\n"
    )
    command = [sys.executable, "-c", script, str(tmp_path / "callers")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "cwd": ROOT}
    processes = [subprocess.Popen(command, **pipes) for _ in range(4)]  # type: ignore[call-overload]
    for process in processes:
        assert process.stdout.readline() == "ready\n"
    answers = [process.communicate("go\n", timeout=60)[0] for process in processes]
    assert sum(map(int, answers)) == 400


def test_nobody_waits_for_a_front_end_that_was_stopped(tmp_path: Path) -> None:
    """It holds the lock of the account: the others count without, and the door stays open."""
    script = (
        "import sys, os, signal\n"
        "from trireme.serving.admission.shared_file import SharedFile\n"
        "with SharedFile(sys.argv[1]).locked(1 << 30) as has_lock:\n"
        "    print(has_lock, flush=True); os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    path = tmp_path / "callers"
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True, cwd=ROOT
    ) as stopped:
        try:
            assert stopped.stdout is not None
            assert stopped.stdout.readline() == "True\n"
            account = SharedQuotas(path).of(b"ann", Rates(2, 0))
            assert account is not None
            began = time.monotonic()
            assert [account.admit(50.0) is None for _ in range(3)] == [True, True, False]
            assert time.monotonic() - began < 1.0
        finally:
            stopped.send_signal(signal.SIGKILL)


def test_of_the_callers_that_share_a_set_the_one_used_longest_ago_makes_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.serving.admission.accounts.NUM_SETS", 1)
    quotas, rates = SharedQuotas(tmp_path / "callers"), Rates(1, 0)

    def may(caller: int, now: float) -> bool:
        account = quotas.of(str(caller).encode(), rates)
        assert account is not None
        return account.admit(now) is None

    assert all(may(caller, 10.0 + caller) for caller in range(NUM_WAYS))
    assert not may(0, 30.0), "known"
    assert may(NUM_WAYS, 31.0)
    assert not may(0, 32.0), "used since: kept"
    assert may(1, 33.0), "used longest ago: forgotten"


async def test_without_a_file_each_front_end_counts_for_itself(tmp_path: Path) -> None:
    shared = open_shared_state(str(tmp_path / "nowhere"), 0, 2)
    assert shared.num_fronts == 1
    account = shared.accounts.of(b"ann", Rates(1, 0))
    assert account is not None
    assert [account.admit(1.0) is None for _ in range(2)] == [True, False]


# ---------------------------------------------------------------- room


def test_choices_of_all_front_ends_count_and_those_of_the_dead_do_not(tmp_path: Path) -> None:
    now = 100.0
    fronts = [Occupancy(tmp_path / "occupancy", i, clock=lambda: now) for i in range(3)]
    assert [front.others(3) for front in fronts] == [0, 0, 0]
    for i, front in enumerate(fronts):
        front.tell(10**i)
    assert [front.others(3) for front in fronts] == [110, 101, 11]
    fronts[2] = Occupancy(tmp_path / "occupancy", 2, clock=lambda: now)
    assert fronts[0].others(3) == 10, "a new life has none yet"
    now += STALE_S / 2
    fronts[2].tell(5)
    now += STALE_S * 0.75
    assert fronts[0].others(3) == 5, "the other one has said nothing for too long"


def test_front_ends_have_one_adaptive_limit(tmp_path: Path) -> None:
    """Four that each see a quarter of the requests find the limit that one would find, and all of them hold it."""
    target_s, per_s, now = 1.0, 50.0, 100.0
    limits = [AdaptiveLimit(target_s, Occupancy(tmp_path / "occupancy", i)) for i in range(4)]
    queue, credit, waits = 0.0, 0.0, []
    for turn in range(12_000):
        now, credit, limit = now + 0.01, credit + 1.5, limits[turn % 4]
        while credit >= 1:
            credit -= 1
            queue += queue < limit.limit(8, 4000)
        queue = max(0.0, queue - per_s * 0.01)
        limit.waited(queue / per_s, int(queue), now)
        waits.append(queue / per_s)
    assert max(waits[9000:]) < 1.5 * target_s
    assert len({limit.limit(8, 4000) for limit in limits}) == 1


@contextlib.asynccontextmanager
async def pair(directory: Path, *engines: FakeEngine, **config: Any) -> AsyncIterator[list[Served]]:
    """Two front ends of one deployment, as two processes would be; the two engines stand for one."""
    async with contextlib.AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                serve(
                    directory / str(i), engine, extra=["word"], shared=open_shared_state(str(directory), i, 2), **config
                )
            )
            for i, engine in enumerate(engines)
        ]


async def test_a_caller_has_its_limit_once(tmp_path: Path) -> None:
    async with pair(tmp_path, FakeEngine([259] * 9), FakeEngine([259] * 9), requests_per_minute=10) as fronts:
        answers = [await fronts[i % 2].request("POST", "/v1/completions", TEXT) for i in range(14)]
        assert [status for status, _, _ in answers] == [200] * 10 + [429] * 4
        left = [int(headers["x-ratelimit-remaining-requests"]) for status, headers, _ in answers if status == 200]
        assert left == list(range(9, -1, -1)), "and hears the same of both"


async def test_tokens_of_a_caller_come_from_one_bucket(tmp_path: Path) -> None:
    async with pair(tmp_path, FakeEngine([259] * 9), FakeEngine([259] * 9), tokens_per_minute=20) as fronts:
        statuses = [(await fronts[i % 2].post("/v1/completions", TEXT))[0] for i in range(4)]
        assert statuses == [200, 200, 200, 429], "5 + 4 each; the third goes into debt"


async def test_room_is_that_of_all_together(tmp_path: Path) -> None:
    """Ten places: both front ends fill them, and neither lets an eleventh in, nor a sixth that can wait."""
    engines = [FakeEngine([259] * 50, max_num_seqs=4, max_waiting=6) for _ in range(2)]
    async with pair(tmp_path, *engines) as fronts:
        for engine in engines:
            engine.hold.clear()
        long = {**TEXT, "max_tokens": 40}
        tasks = []
        for i in range(10):
            tasks.append(asyncio.create_task(fronts[i % 2].post("/v1/completions", long)))
            async with asyncio.timeout(5):
                while sum(served.front.client.num_choices for served in fronts) < i + 1:
                    await asyncio.sleep(0.005)
            if i == 4:
                for served in fronts:
                    status, answer = await served.post("/v1/completions", {**long, "priority": 1})
                    assert status == 503, answer
                    assert "5 choices are running or queued" in answer["error"]["message"]
        for served in fronts:
            status, answer = await served.post("/v1/completions", long)
            assert status == 503
            assert "10 choices are running or queued" in answer["error"]["message"]
        for engine in engines:
            engine.hold.set()
        assert [status for status, _ in await asyncio.gather(*tasks)] == [200] * 10
        assert [(await served.post("/v1/completions", long))[0] for served in fronts] == [200, 200]


def test_the_account_of_a_caller_outlives_its_front_end(tmp_path: Path) -> None:
    config = ServingConfig(requests_per_minute=2, api_servers=2)
    for life in range(3):
        shared = open_shared_state(str(tmp_path), life % 2, 2)
        admission = Admission(config, queue_s=0.0, accounts=shared.accounts, cell=shared.occupancy)
        caller: Caller = admission.caller({"client": ("10.0.0.1", 1)})
        if life < 2:
            admission.admit(caller)
        else:
            with pytest.raises(OverloadedError, match="2 requests per minute"):
                admission.admit(caller)
        shared.accounts.close()  # type: ignore[attr-defined]


# ---------------------------------------------------------------- counters


def counted(num: int, open_: int = 0) -> Telemetry:
    one = Telemetry()
    one.count("trireme_requests|complete", num)
    one.count("trireme_requests_received|chat", num + open_)
    one.observe("trireme_inter_token_seconds", 0.02, times=num)
    one.open = open_
    return one


async def test_a_front_end_goes_on_counting_where_its_former_life_ended(tmp_path: Path) -> None:
    """And the requests that were open when it died have failed: received = complete + error + cancelled again."""
    first = Aggregation(str(tmp_path), 0, 1, counted(5, open_=2).snapshot)
    await first.start()
    assert (await first.snapshots())[0].gauges["trireme_streams_open"] == 2
    for life in range(2):
        again = Aggregation(str(tmp_path), 0, 1, counted(1).snapshot)
        await again.start()
        (seen,) = await again.snapshots()
        assert seen.counters["trireme_requests|complete"] == 6 + life
        assert seen.counters["trireme_requests|error"] == 2
        assert seen.counters["trireme_requests_received|chat"] == 8 + life
        assert seen.histograms["trireme_inter_token_seconds"].buckets[6] == 6 + life  # 16 to 20 ms
        assert seen.gauges["trireme_streams_open"] == 0
        again.close()
    first.close()


async def test_the_numbers_of_a_sibling_stay_when_it_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trireme.serving.metrics.aggregation.ASK_TIMEOUT_S", 0.1)
    telling = counted(3, open_=1)
    admission_fields, sibling = (
        Aggregation(str(tmp_path), i, 2, t.snapshot) for i, t in enumerate((counted(1), telling))
    )
    await admission_fields.start()
    await sibling.start()

    async def seen() -> tuple[float, float, float]:
        total = merged(await admission_fields.snapshots())
        counters = total.counters
        return (
            counters["trireme_requests|complete"],
            counters["trireme_requests|error"],
            total.gauges["trireme_streams_open"],
        )

    assert await seen() == (4, 0, 1)
    telling.count("trireme_requests|complete", 6)
    telling.count("trireme_requests_received|chat", 6)
    assert await seen() == (10, 0, 1)
    path = tmp_path / "front-1.stats"
    assert sibling._server is not None
    sibling._server.close()  # as when it is killed
    path.unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(path))
        silent.listen()
        assert await seen() == (10, 0, 1), "busy: the last that is known"
    assert await seen() == (10, 1, 0), "dead: what it had open is lost"
    admission_fields.close()


async def test_a_death_loses_at_most_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody has asked this one: it saves its numbers by itself."""
    monkeypatch.setattr("trireme.serving.metrics.aggregation.SAVE_S", 0.01)
    telling = counted(0)
    killed = Aggregation(str(tmp_path), 0, 1, telling.snapshot)
    await killed.start()
    telling.count("trireme_requests|complete", 9)
    await asyncio.sleep(0.1)
    again = Aggregation(str(tmp_path), 0, 1, counted(0).snapshot)
    await again.start()
    assert (await again.snapshots())[0].counters["trireme_requests|complete"] == 9
    for each in (killed, again):
        each.close()


async def test_front_ends_on_ports_of_their_own_tell_their_own_numbers(tmp_path: Path) -> None:
    fronts = [Aggregation(str(tmp_path), i, 2, counted(i + 1).snapshot, is_alone=True) for i in range(2)]
    for front in fronts:
        await front.start()
    found = [await front.snapshots() for front in fronts]
    assert [[s.counters["trireme_requests|complete"] for s in seen] for seen in found] == [[1], [2]]
    for front in fronts:
        front.close()


@pytest.mark.parametrize("is_shared", [False, True])
def test_an_engines_counters_are_sums_over_its_lives(tmp_path: Path, is_shared: bool) -> None:
    path = tmp_path / "totals" if is_shared else None
    one, other = EngineTotals(ENGINE_COUNTERS, path), EngineTotals(ENGINE_COUNTERS, path)
    if not is_shared:
        other = one
    assert one.over_lives(3, {}) == {}
    assert one.over_lives(3, {"epoch": 0, "steps": 10, "num_running": 4})["steps"] == 10
    assert other.over_lives(3, {}) == {"steps": 10}, "away: its counters stay, its gauges do not"
    assert other.over_lives(3, {"epoch": 1, "steps": 2, "num_running": 1}) == {
        "epoch": 1,
        "steps": 12,
        "num_running": 1,
    }
    assert one.over_lives(3, {"epoch": 1, "steps": 1})["steps"] == 12, "an answer that was overtaken"
    assert one.over_lives(3, {"epoch": 0, "steps": 11})["steps"] == 12, "or is of a former life"
    assert one.over_lives(3, {"epoch": 4, "steps": 1})["steps"] == 13
    assert other.over_lives(3, {})["steps"] == 13
    assert other.over_lives(2, {"epoch": 0, "steps": 1})["steps"] == 1


async def test_the_page_keeps_an_engines_counters_through_its_death(tmp_path: Path) -> None:
    engine = FakeEngine(words("ok"))
    async with serve(tmp_path, engine) as served:
        engine.stats = {"steps": 7}
        assert (await served.numbers())['trireme_engine_steps_total{engine="0"}'] == 7
        engine.die()
        numbers = await served.numbers()
        assert numbers['trireme_engine_steps_total{engine="0"}'] == 7
        assert numbers['trireme_engine_up{engine="0"}'] == 0
        assert 'trireme_requests_running{engine="0"}' not in numbers
        engine.revive()
        engine.stats = {"steps": 2}
        assert (await served.numbers())['trireme_engine_steps_total{engine="0"}'] == 9
