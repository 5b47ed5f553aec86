"""One injection and its verdict: 64 streams, a fault at a random moment, and everything that must hold afterwards.

A breach is a sentence; a round without one has passed. Hung, ended twice, wrong, lost, late, not given back, left behind: each is
looked for here and nowhere else.
"""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from random import Random

from scripts.streams import Answer, ask, difference_of
from tests.chaos.faults import Fault
from tests.chaos.site import Injury, Site
from trireme.launch.processes.events import Died

CANCEL_ONE_IN = 8
WATCH_S = 15.0  # beyond the limit, to tell late from never
NUM_LATE = 8  # streams that begin after the fault


AWAY_S = 0.5  # a machine that left us no turn for so long proves nothing about times


class Pulse:
    """The longest time for which this process, which only sleeps, did not run: the machine had stopped, or had no time for us."""

    def __init__(self) -> None:
        self.longest_s = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat, daemon=True)

    def __enter__(self) -> Pulse:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _beat(self) -> None:
        last = time.monotonic()
        while not self._is_over.wait(0.1):
            now = time.monotonic()
            self.longest_s, last = max(self.longest_s, now - last), now


@dataclass
class Verdict:
    """What one injection showed. `num_running`: streams under way when it was done; none: it proved nothing. `away_s`: how long
    the machine stood still meanwhile; beyond AWAY_S the round does not count, though its tokens must be right."""

    num_running: int = 0
    noticed_s: float | None = None
    took_s: float = 0.0
    num_broken: int = 0
    away_s: float = 0.0
    what: str = ""
    died: list[str] = field(default_factory=list)
    late: list[str] = field(default_factory=list)  # breaches of limits of time alone
    breaches: list[str] = field(default_factory=list)


def run_round(site: Site, fault: Fault, rng: Random) -> Verdict:
    """Raises nothing for what the deployment does wrong."""
    deaths = len(site.deployment.died)
    with Pulse() as pulse:
        verdict, injury, injured = _injure(site, fault, rng)
        for settle in (site.until_quiet, site.until_census):
            try:
                settle()
            except TimeoutError as error:
                verdict.breaches.append(str(error))
    died = site.deployment.died[deaths:]
    verdict.died = [f"{at - injured:.1f} s: {event.error}" for at, event in died]
    verdict.breaches += judge_deaths(fault, injury, [event for _, event in died])
    verdict.away_s = pulse.longest_s
    if verdict.away_s > AWAY_S:
        verdict.num_running, verdict.late, verdict.noticed_s = 0, [], None
    return verdict


def _injure(site: Site, fault: Fault, rng: Random) -> tuple[Verdict, Injury, float]:
    """The verdict so far, what was done, and when."""
    assert fault.inject is not None
    verdict, began = Verdict(), time.monotonic()
    answers = [Answer() for _ in site.bodies]
    cancels = [rng.randrange(2, 40) if rng.randrange(CANCEL_ONE_IN) == 0 else 0 for _ in site.bodies]
    port, deaths = site.deployment.port, len(site.deployment.died)
    with ThreadPoolExecutor(len(answers)) as pool:
        streams = list(zip(site.bodies, cancels, answers, strict=True))
        for body, cancel, answer in streams[:-NUM_LATE]:
            pool.submit(ask, port, body, cancel_after=cancel, answer=answer)
        time.sleep(rng.uniform(0.0, site.usual_s))
        verdict.num_running = sum(not answer.end for answer in answers[:-NUM_LATE])
        injected = time.monotonic()
        with fault.inject(site, rng) as injury:
            for body, cancel, answer in streams[-NUM_LATE:]:
                pool.submit(ask, port, body, cancel_after=cancel, answer=answer)
            if fault.notice:
                verdict.noticed_s = _watch(site, fault, injury, deaths, injected)
            time.sleep(max(0.0, injected + fault.lasts_s - time.monotonic()))
    if fault.notice and verdict.noticed_s is None:
        verdict.breaches.append(f"the {fault.notice} was not noticed")
    verdict.late = judge_notice(fault, verdict.noticed_s)
    verdict.breaches += injury.breaches + judge_streams(site.reference, answers, cancels, injury)
    verdict.num_broken = sum(answer.end == "broken" for answer in answers)
    verdict.what = injury.what
    if not injury.is_done:
        verdict.num_running = 0
    verdict.took_s = time.monotonic() - began
    return verdict, injury, injected


def judge_streams(
    reference: Sequence[Answer], answers: Sequence[Answer], cancels: Sequence[int], injury: Injury
) -> list[str]:
    """Every stream is whole and equal; one that was cancelled, or whose server was killed, is the beginning of that."""
    breaches = []
    for i, (want, got) in enumerate(zip(reference, answers, strict=True)):
        if got == want:
            continue
        is_cut = (cancels[i] and got.end == "cancelled") or (got.end == "broken" and got.local_port in injury.ports)
        if not is_cut:
            breaches.append(f"stream {i}: {difference_of(want, got)}")
        elif not got.is_beginning_of(want):
            breaches.append(f"stream {i}: what was heard before it was {got.end} is not how the answer begins")
    return breaches


def judge_deaths(fault: Fault, injury: Injury, died: Sequence[Died]) -> list[str]:
    """What was injured dies once, or more often while a resource that its next life needs is not there; nobody else dies."""
    if fault.may_die:
        return []
    left = list(injury.parts) if fault.notice == "death" else []
    breaches = []
    for event in died:
        if event.name in left:
            left.remove(event.name)
        elif not (fault.family == "resource" and event.name in injury.parts):
            breaches.append(f"needless death of {event.name}: {event.error}")
    return breaches


def judge_notice(fault: Fault, noticed_s: float | None) -> list[str]:
    if noticed_s is None or noticed_s <= fault.within_s:
        return []
    return [f"noticed after {noticed_s:.2f} s; the limit is {fault.within_s:g} s"]


def _watch(site: Site, fault: Fault, injury: Injury, deaths: int, injected: float) -> float | None:
    """Seconds from the injection to its notice, or None when there was none in a good while."""

    def told() -> float | None:
        died = {event.name: at for at, event in site.deployment.died[deaths:]}
        if all(part in died for part in injury.parts):
            return max(died[part] for part in injury.parts)
        return None

    look: Callable[[], float | None] = told if fault.notice == "death" else lambda: _stalled(site)
    while time.monotonic() < injected + fault.within_s + WATCH_S:
        if (noticed := look()) is not None:
            return noticed - injected
        time.sleep(0.01 if fault.notice == "death" else 0.05)
    return None


def _stalled(site: Site) -> float | None:
    """Now, if /ready tells of an engine that makes no progress."""
    try:
        engines = json.loads(site.deployment.get("/ready", timeout_s=1.0)[1])["engines"]
    except (OSError, http.client.HTTPException):
        return None
    return time.monotonic() if any(engine["stalled"] for engine in engines) else None
