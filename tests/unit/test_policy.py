"""Policies through a running core: what each promises, whatever arrives. Tokens must be right under every one of them."""

from __future__ import annotations

import random
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.engine_driver import Driver, Row, make_limits
from trireme.engine_core.scheduling.policies.base import POLICIES, Policy, PolicySettings
from trireme.engine_core.scheduling.policies.fair import MAX_CLIENTS, OUTPUT_COST, PROMPT_COST, FairShare
from trireme.engine_core.scheduling.policies.feedback import QUANTUM, first_level
from trireme.engine_core.scheduling.request import PolicyAccount, QueueWait, RequestStats, State
from trireme.engine_core.scheduling.waiting import WaitingQueue
from trireme.errors import ConfigError

NAMES = ("fcfs", "priority", "deadline", "fair", "feedback")


def starts(driver: Driver, rows: list[Row]) -> list[Row]:
    """The rows in the order of their first tokens."""
    order: list[Row] = []
    while driver.step():
        order += [row for row in rows if row.tokens and row not in order]
    return order


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_every_policy_keeps_the_laws_and_the_tokens(name: str, ahead: bool) -> None:
    """Scarce blocks and slots, everything random, each conservation law checked after each event."""
    for seed in range(6):
        dice = random.Random(seed)
        limits = make_limits(num_blocks=24, max_len=96, max_num_seqs=3, max_num_tokens=16, chunk=8)
        driver = Driver(limits, policy=name, ahead=ahead)
        rows = []
        for _ in range(30):
            rows.append(
                driver.submit(
                    dice.randrange(1, 60),
                    dice.randrange(1, 36),
                    priority=dice.randrange(-3, 4),
                    client=bytes([dice.randrange(4)]),
                    deadline_s=dice.choice((0.0, 50.0, 100.0)),
                )
            )
            for _ in range(dice.randrange(4)):
                driver.step()
            if dice.random() < 0.1:
                driver.abort(dice.choice([row for row in rows if not row.ends] or [rows[-1]]))
        driver.run()
        for row in rows:
            driver.check_tokens(row)


def test_priorities_come_first_and_waiting_makes_up_for_them() -> None:
    driver = Driver(make_limits(max_num_seqs=1), policy="priority", settings=PolicySettings(aging_s=1.0))
    first = driver.submit(4, 2)
    driver.step()
    low, high, middle = (driver.submit(4 + i, 2, priority=level) for i, level in enumerate((5, 0, 3)))
    assert starts(driver, [low, high, middle]) == [high, middle, low]
    assert first.end.reason == "length"

    old = driver.submit(4, 30, priority=0)
    driver.step()
    patient = driver.submit(5, 2, priority=3)
    driver.now += 3.5
    fresh = driver.submit(6, 2, priority=0)
    assert starts(driver, [patient, fresh]) == [patient, fresh], "3.5 s are worth more than 3 levels"
    assert len(old.tokens) == 30


@pytest.mark.parametrize("name", NAMES)
def test_a_row_from_an_engine_that_died_keeps_its_place_in_time(name: str) -> None:
    """It goes before whoever was asked for later, also before those that were in this queue already; in a queue of ties too."""
    driver = Driver(make_limits(max_num_seqs=1, max_waiting=8), policy=name)
    driver.now = 100.0
    driver.submit(4, 2)
    driver.step()
    first = driver.submit(4, 2)
    driver.now += 1.0
    second = driver.submit(4, 2)
    between = driver.submit(4, 2, num_moves=1, waited_s=0.5)
    oldest = driver.submit(4, 2, num_moves=1, waited_s=30.0)
    assert driver.core.stats(driver.now).oldest_wait_s == pytest.approx(1.0), (
        "how long this engine's queue is, not how old"
    )
    assert starts(driver, [first, second, between, oldest]) == [oldest, first, between, second]
    assert oldest.firsts[0].queued_s < 1.0


def test_age_does_not_shorten_a_deadline_twice() -> None:
    """`deadline_s` and `total_s` are what is left of them on arrival."""
    driver = Driver(make_limits(max_num_seqs=1), policy="deadline")
    driver.now = 100.0
    driver.submit(4, 2)
    driver.step()
    moved = driver.submit(4, 2, num_moves=1, waited_s=30.0, deadline_s=20.0)
    fresh = driver.submit(4, 2, deadline_s=19.0)
    assert starts(driver, [moved, fresh]) == [fresh, moved]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.integers(-4, 4), st.floats(0, 3)), min_size=2, max_size=60), st.integers(0, 99))
def test_aging_bounds_how_long_anybody_is_overtaken(arrivals: list[tuple[int, float]], seed: int) -> None:
    """Nobody who arrives more than `aging_s` per level (and one for the boost) later goes first: so nobody starves."""
    aging_s = 0.5
    queue = WaitingQueue(POLICIES.find("priority")(PolicySettings(aging_s=aging_s)))
    dice, now, waiting = random.Random(seed), 0.0, []
    for arrival, (level, gap_s) in enumerate(arrivals):
        now += gap_s
        preempted = int(dice.random() < 0.2)
        request = fake_request(arrival, now, priority=level, num_preemptions=preempted)
        queue.push(request)
        waiting.append(request)
        if dice.random() < 0.5:
            head = queue.peek()
            assert head is not None
            for other in waiting:
                levels = other.priority - head.priority + head.stats.num_preemptions
                assert head.arrival_s - other.arrival_s <= max(0, levels) * aging_s + 1e-9
            queue.discard(head)
            waiting.remove(head)


def fake_request(
    arrival: int, now: float, *, priority: int = 0, client: bytes = b"", due_s: float = 0.0, num_preemptions: int = 0
) -> SimpleNamespace:
    return SimpleNamespace(
        state=State.WAITING,
        arrival=arrival,
        arrival_s=now,
        priority=priority,
        client=client,
        num_tokens=1,
        num_prompt=1,
        key=(),
        wait=QueueWait(bound_s=0.0, due_s=due_s, may_move=False),
        stats=RequestStats(now, num_preemptions=num_preemptions),
        account=PolicyAccount(1),
    )


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.floats(0, 2), st.sampled_from((0.0, 0.5, 1.0, 7.0, 300.0))), max_size=60), st.randoms())
def test_earliest_deadline_is_always_first(arrivals: list[tuple[float, float]], dice: random.Random) -> None:
    queue = WaitingQueue(POLICIES.find("deadline")(PolicySettings(due_s=60.0)))
    now, waiting = 0.0, []
    for arrival, (gap_s, due_s) in enumerate(arrivals):
        now += gap_s
        waiting.append(fake_request(arrival, now, due_s=due_s))
        queue.push(waiting[-1])
        if dice.random() < 0.6:
            head = min(waiting, key=lambda row: (row.arrival_s + (row.wait.due_s or 60.0), row.arrival))
            assert queue.peek() is head
            queue.discard(head)
            waiting.remove(head)


def test_deadlines_order_real_rows_and_a_whole_deadline_ends_one() -> None:
    driver = Driver(make_limits(max_num_seqs=1), policy="deadline")
    running = driver.submit(4, 40, total_s=0.2)
    driver.step()
    none, late, soon = (driver.submit(4 + i, 2, deadline_s=due) for i, due in enumerate((0.0, 30.0, 20.0)))
    while not running.ends:
        driver.core.tick(driver.now)
        driver.collect()
        driver.step()
    assert (running.end.reason, running.end.error_code) == ("error", "deadline_exceeded")
    assert 0 < len(running.tokens) < 40
    assert starts(driver, [none, late, soon]) == [soon, late, none]
    driver.run()


# ---------------------------------------------------------------- fair share


def test_one_client_with_many_requests_does_not_delay_another() -> None:
    driver = Driver(make_limits(max_num_seqs=2), policy="fair")
    greedy = [driver.submit(4 + i, 6, client=b"greedy") for i in range(20)]
    driver.step()
    modest = driver.submit(30, 6, client=b"modest")
    order = starts(driver, [modest, *greedy])
    assert order.index(modest) <= 2


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000), st.integers(2, 5), st.integers(1, 6), st.booleans())
def test_shares_of_busy_clients_stay_within_the_bound(seed: int, num_clients: int, num_seqs: int, ahead: bool) -> None:
    """Clients that always have requests queued, of very different sizes: what they were served differs at every moment by no
    more than the paper's bound, twice what one request or a full batch can be."""
    limits = make_limits(
        num_blocks=60,
        max_len=60,
        max_num_seqs=num_seqs,
        max_num_tokens=32,
        chunk=16,
        max_waiting=999,
        prefix_cache=False,
    )
    driver = Driver(limits, policy="fair", ahead=ahead)
    dice = random.Random(seed)
    clients = [bytes([index]) for index in range(num_clients)]
    sizes = {client: (dice.randrange(1, 30), dice.randrange(1, 30)) for client in clients}
    rows: dict[bytes, list[Row]] = {client: [] for client in clients}
    bound = 2 * max(PROMPT_COST * 30, OUTPUT_COST * num_seqs * 60)
    for _ in range(300):
        for client in clients:
            while sum(not row.firsts for row in rows[client]) < num_seqs + 2:
                prompt, answer = sizes[client]
                rows[client].append(driver.submit(dice.randrange(1, prompt + 1), answer, client=client))
        driver.step()
        served = [sum(cost(row) for row in rows[client]) for client in clients]
        assert max(served) - min(served) <= bound
    assert min(served) > 0


def cost(row: Row) -> float:
    return PROMPT_COST * len(row.prompt) * bool(row.firsts) + OUTPUT_COST * len(row.tokens)


def test_a_client_that_was_away_has_saved_nothing_up() -> None:
    driver = Driver(make_limits(max_num_seqs=1, prefix_cache=False), policy="fair")
    for i in range(10):
        driver.submit(10 + i, 8, client=b"a")
    for _ in range(60):
        driver.step()
    late = [driver.submit(30 + i, 8, client=b"b") for i in range(10)]
    order = starts(driver, [row for row in driver.rows.values() if not row.tokens])
    owners = ["b" if row in late else "a" for row in order]
    assert owners[:6].count("a") >= 2, owners


def test_counters_of_clients_are_bounded_and_forgetting_gives_no_credit() -> None:
    policy = FairShare(PolicySettings())
    for number in range(3 * MAX_CLIENTS):
        policy.counters[number] = policy.standing(number) + number
        policy.entered(number, 0.0)
        assert len(policy.counters) <= MAX_CLIENTS + 1
    forgotten = next(number for number in range(3 * MAX_CLIENTS) if number not in policy.counters)
    assert policy.standing(forgotten) >= forgotten


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 10_000))
def test_the_queue_finds_the_least_standing_whatever_grows(seed: int) -> None:
    """Against a full scan, while standings grow at random."""
    dice = random.Random(seed)
    policy = FairShare(PolicySettings())
    queue = WaitingQueue(policy)
    live = []
    for arrival in range(150):
        live.append(fake_request(arrival, 0.0, client=bytes([dice.randrange(6)])))
        queue.push(live[-1])
        for _ in range(dice.randrange(3)):
            grown = bytes([dice.randrange(6)])
            policy.counters[grown] = policy.standing(grown) + dice.randrange(9)
        while len(live) > 12 or (live and dice.random() < 0.4):
            head = queue.peek()
            assert head is not None
            assert policy.standing(head.client) == min(policy.standing(row.client) for row in live)
            assert head.arrival == min(row.arrival for row in live if row.client == head.client)
            gone = head if dice.random() < 0.7 else dice.choice(live)
            queue.discard(gone)
            live.remove(gone)
    assert len(queue) == len(live)


def test_queue_cost_does_not_grow_with_its_length() -> None:
    """Key functions called per served request, with 100 and with 10,000 queued: about the same."""

    def calls(num_queued: int) -> float:
        policy = FairShare(PolicySettings())
        count = 0
        plain = policy.standing

        def counted(lane: object) -> float:
            nonlocal count
            count += 1
            return plain(lane)

        queue = WaitingQueue(policy)
        for arrival in range(num_queued):
            queue.push(fake_request(arrival, 0.0, client=bytes([arrival % 10])))
        policy.standing = counted  # type: ignore[method-assign]
        for _ in range(90):
            head = queue.peek()
            assert head is not None
            queue.discard(head)
            policy.counters[head.client] = plain(head.client) + 1.0
        return count / 90

    assert calls(10_000) <= calls(100) + 1
    assert calls(10_000) < 8


# ---------------------------------------------------------------- feedback


def test_levels_follow_the_prompt() -> None:
    assert [first_level(count) for count in (1, QUANTUM, QUANTUM + 1, 2 * QUANTUM, 2 * QUANTUM + 1)] == [0, 0, 1, 1, 2]


def test_short_answers_overtake_a_long_one_and_the_long_one_ends_too() -> None:
    limits = make_limits(max_num_seqs=1, max_len=700, num_blocks=400)
    driver = Driver(limits, policy="feedback")
    long = driver.submit(5, 600)
    driver.step()
    short = [driver.submit(6 + i, 5) for i in range(3)]
    ends = []
    while driver.step():
        ends += [row for row in (long, *short) if row.ends and row not in ends]
    assert ends == [*short, long]
    assert long.end.num_preemptions == 1, "it lost its slot once, when its first quantum was over"
    driver.check_tokens(long)


def test_no_row_loses_its_slot_to_one_that_may_not_start() -> None:
    """In a pause that lets rows end first, what queues must wait, however urgent it is."""
    driver = Driver(make_limits(max_num_seqs=1, max_len=700, num_blocks=400), policy="feedback")
    long = driver.submit(5, 600)
    driver.step()
    short = driver.submit(6, 5)
    driver.core.scheduler.admits = False
    while driver.step():
        assert not short.tokens
    assert long.end.num_preemptions == 0
    driver.check_tokens(long)
    driver.core.scheduler.admits = True
    driver.run()
    driver.check_tokens(short)


def test_a_long_answer_is_not_overtaken_for_ever() -> None:
    limits = make_limits(max_num_seqs=1, max_len=700, num_blocks=400, max_waiting=5000)
    driver = Driver(limits, policy="feedback", settings=PolicySettings(aging_s=0.2))
    long = driver.submit(5, 300)
    for i in range(3000):
        driver.submit(6 + i % 40, 2)
        driver.step()
        if long.ends:
            break
    assert long.end.reason == "length", "more short ones arrive than can be served, and yet it ends"


# ---------------------------------------------------------------- plug-ins


def test_unknown_policies_are_named_with_the_known_ones() -> None:
    with pytest.raises(
        ConfigError, match=r"no scheduling policy 'lottery'; known: fcfs, priority, deadline, fair, feedback"
    ):
        POLICIES.find("lottery")


@pytest.fixture
def plugin(tmp_path, monkeypatch) -> str:
    """A package beside ours, installed as pip would leave it."""
    (tmp_path / "last_first.py").write_text(
        "from trireme.engine_core.scheduling.policies.base import Policy\n"
        "class LastFirst(Policy):\n"
        "    def key(self, request):\n"
        "        return (-request.arrival,)\n"
    )
    info = tmp_path / "last_first-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: last-first\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[trireme.policies]\nlifo = last_first:LastFirst\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    return "lifo"


def test_a_policy_comes_from_an_entry_point(plugin: str) -> None:
    assert issubclass(POLICIES.find(plugin), Policy)  # type: ignore[arg-type]
    driver = Driver(make_limits(max_num_seqs=1), policy=plugin)
    driver.submit(4, 2)
    driver.step()
    rows = [driver.submit(5 + i, 2) for i in range(3)]
    assert starts(driver, rows) == rows[::-1]
