"""What counts as a breach: the verdicts of tests/chaos/rounds.py on streams that went wrong in each way."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from scripts.streams import Answer
from tests.chaos.faults import FAULTS, Fault
from tests.chaos.rounds import judge_deaths, judge_notice, judge_streams
from tests.chaos.site import Injury
from trireme.launch.processes.events import Died

PORT = 4242


def whole() -> Answer:
    choice: dict[str, Any] = {"text": "abcd", "ids": [97, 98, 99, 100], "ends": [["length", None]], "logprobs": {}}
    return Answer("done", choices={0: choice, 1: copy.deepcopy(choice)}, usage=[3, 8], local_port=PORT)


def changed(end: str, **choice: Any) -> Answer:
    answer = whole()
    answer.end = end  # type: ignore[assignment]
    answer.choices[0] |= choice
    return answer


def breaches(answer: Answer, *, cancel: int = 0, ports: frozenset[int] = frozenset()) -> list[str]:
    return judge_streams([whole()], [answer], [cancel], Injury(ports=set(ports)))


BEGINNING: dict[str, Any] = {"text": "ab", "ids": [97, 98], "ends": []}
ALLOWED = frozenset({PORT})


def test_a_whole_answer_is_no_breach() -> None:
    assert breaches(whole()) == []
    assert breaches(whole(), cancel=7) == []  # it was faster than its cancel


@pytest.mark.parametrize(
    "answer",
    [
        changed("hung", **BEGINNING),
        changed("", **BEGINNING),
        changed("broken", **BEGINNING),
        changed("error", **BEGINNING),
        changed("refused", text="", ids=[], ends=[]),
        changed("done", ends=[["length", None], ["length", None]]),
        changed("done", ends=[]),
        changed("done", ids=[97, 98, 99, 101]),
        changed("done", ids=[97, 98, 98, 99, 100]),
        changed("done", text="abc"),
        changed("done", logprobs={"tokens": ["a"]}),
    ],
)
def test_what_must_not_be(answer: Answer) -> None:
    assert len(breaches(answer)) == 1


def test_only_streams_of_a_killed_server_may_break_and_must_be_right_until_then() -> None:
    cut = changed("broken", **BEGINNING)
    assert breaches(cut, ports=ALLOWED) == []
    assert len(breaches(cut, ports=frozenset({PORT + 1}))) == 1
    assert len(breaches(changed("error", **BEGINNING), ports=ALLOWED)) == 1
    assert len(breaches(changed("broken", ids=[97, 99], text="a"), ports=ALLOWED)) == 1


def test_a_cancelled_stream_was_right_until_then() -> None:
    assert breaches(changed("cancelled", **BEGINNING), cancel=2) == []
    assert len(breaches(changed("cancelled", ids=[98], text="b", ends=[]), cancel=2)) == 1
    assert len(breaches(changed("hung", **BEGINNING), cancel=2)) == 1
    twice = changed("cancelled", ends=[["length", None], ["length", None]])
    assert len(breaches(twice, cancel=2)) == 1


def test_notices_have_limits() -> None:
    fault = Fault("f", "kill", notice="death", within_s=1.0)
    assert judge_notice(fault, 0.9) == []
    assert len(judge_notice(fault, 1.1)) == 1
    assert judge_notice(Fault("f", "kill"), None) == []


def died(*names: str) -> list[Died]:
    return [Died(name, f"{name} was killed by SIGKILL", 0.05, 1) for name in names]


def test_nobody_dies_but_who_was_injured_and_that_once() -> None:
    kill, stall = Fault("f", "kill", notice="death"), Fault("f", "freeze", notice="stall")
    hit = Injury(["front-0"])
    assert judge_deaths(kill, hit, died("front-0")) == []
    assert judge_deaths(kill, hit, []) == []  # that it was not noticed is judged elsewhere
    (breach,) = judge_deaths(kill, hit, died("front-0", "engine-1"))
    assert "engine-1" in breach
    assert len(judge_deaths(kill, hit, died("engine-0", "front-0", "engine-1"))) == 2
    assert len(judge_deaths(kill, hit, died("front-0", "front-0"))) == 1
    assert len(judge_deaths(stall, Injury(), died("engine-0"))) == 1
    full = Fault("f", "resource", notice="death")
    assert judge_deaths(full, hit, died("front-0", "front-0")) == []
    assert len(judge_deaths(full, hit, died("front-0", "engine-0"))) == 1
    assert judge_deaths(Fault("f", "message", may_die=True), Injury(), died("engine-0")) == []


def test_the_table_says_for_each_fault_what_is_done_or_why_not() -> None:
    names = [fault.name for fault in FAULTS]
    assert len(set(names)) == len(names)
    assert all((fault.inject is None) == bool(fault.missing) for fault in FAULTS)
