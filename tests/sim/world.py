"""One world: the scene of a seed brought to life, its faults carried out, its promises checked."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

from tests.sim.books import Answer, Books, Breach
from tests.sim.hosts import CoordinatorHost, EngineHost, FrontHost
from tests.sim.reader import read
from tests.sim.scene import Scene, draw_scene
from trireme.coordinator.simulation.faults import Fault
from trireme.coordinator.simulation.network import Network, Path
from trireme.coordinator.simulation.timeline import Process, Timeline
from trireme.coordinator.simulation.trace import Trace, told
from trireme.transport.wire.messages import Drain

PATIENCE_S = 120.0  # after the last fault is over, for every request to end
SETTLE_S = 2.5  # then, for every message to arrive and every process to report
QUIET_LOOKS = 8  # what is stuck is given up by then, and the slowest message is there
LEASES_S = 33.0  # for lost tickets to expire
MOST_EVENTS = 300_000


@dataclass(frozen=True)
class Result:
    """What became of one seed."""

    seed: int
    breach: str
    outcomes: Counter[str]
    num_events: int
    virtual_s: float
    digest: int = 0


@dataclass(frozen=True)
class Cast:
    """The classes that play: a test plants a fault by another one."""

    engine: type[EngineHost] = EngineHost
    coordinator: type[CoordinatorHost] = CoordinatorHost
    front: type[FrontHost] = FrontHost


class World:
    """Everything of one run. Only `rng` decides what the scene has not decided yet."""

    def __init__(self, scene: Scene, *, trace: Trace | None = None, cast: Cast | None = None) -> None:
        self.scene = scene
        self.rng = random.Random(scene.seed ^ 0x5EED)
        self.timeline = Timeline()
        self.network = Network(self.timeline, self.rng, self._delay, twice=scene.twice, most_unread=scene.most_unread)
        self.trace = trace
        if trace is not None:
            self.network.note = lambda sender, to, message: self.note(f"{sender} > {to}", told(message))
        self.books = Books(self)
        self.cast = cast or Cast()
        self.engines: dict[str, EngineHost] = {}
        self.fronts: dict[str, FrontHost] = {}
        self.coordinator: CoordinatorHost | None = None
        self.answers = [Answer(self, ask) for ask in scene.asks]
        self._epochs: Counter[str] = Counter()
        self._slow_until: dict[Path, float] = {}
        self._num_coming = 0  # processes on their way back
        self._num_over = 0  # answers, from the first, that are known to be over

    def note(self, who: str, what: str) -> None:
        if self.trace is not None:
            self.trace.note(self.timeline.now, who, what)

    # ------------------------------------------------------------ the run

    def run(self) -> None:
        """From the first process to the last check. Raises Breach, or whatever a part raised."""
        self._begin()
        calm_at = max([fault.at + fault.seconds for fault in self.scene.faults], default=0.0) + self.scene.horizon_s
        self._pass(calm_at + PATIENCE_S, until_over=True)
        late = [answer for answer in self.answers if not answer.is_over]
        if late:
            raise Breach(f"R1: requests {[(a.ask.index, a.outcome) for a in late]} hang at {self.timeline.now:.1f} s")
        self._pass(max(self.timeline.now, calm_at))
        while self._num_coming:
            self._pass(self.timeline.now + 1.0)
        self._pass(self.timeline.now + SETTLE_S)
        if self.coordinator is not None and self.coordinator.num_tickets:
            self._pass(self.timeline.now + LEASES_S)
        for _ in range(QUIET_LOOKS):
            try:
                return self.books.check_quiet(list(self.fronts.values()))
            except Breach:
                self._pass(self.timeline.now + SETTLE_S)
        self.books.check_quiet(list(self.fronts.values()))

    def end(self) -> None:
        for host in self.fronts.values():
            host.process.kill()
            host.loop.end()

    def _pass(self, until: float, *, until_over: bool = False) -> None:
        is_over = self._is_over if until_over else None
        if not self.timeline.run(until, most=MOST_EVENTS, is_over=is_over):
            raise Breach(f"spin: {MOST_EVENTS} events, and it is {self.timeline.now:.3f} s only")

    def _is_over(self) -> bool:
        """Asked at every event: answers that were over stay so, and need not be looked at again."""
        answers, at = self.answers, self._num_over
        while at < len(answers) and answers[at].is_over:
            at += 1
        self._num_over = at
        return at == len(answers)

    def _begin(self) -> None:
        if self.scene.has_coordinator:
            self._start_coordinator()
        for name in self.scene.engines:
            self.timeline.after(self.rng.random() * 0.1, self._start_engine, name)
        for name in self.scene.fronts:
            self._start_front(name)
        for answer in self.answers:
            self.timeline.at(answer.ask.at, self._ask, answer)
        for fault in self.scene.faults:
            self.timeline.at(fault.at, self._fail, fault)

    def _ask(self, answer: Answer) -> None:
        host = self.fronts[answer.ask.front]
        if not host.process.is_alive:
            answer.outcome = "gone"
            return
        answer.host = host
        host.start(read(host.client, answer), f"ask-{answer.ask.index}")

    # ------------------------------------------------------------ lives

    def new_process(self, name: str, epoch: int) -> Process:
        self.note(name, f"begins, epoch {epoch}")
        return Process(self.timeline, name, epoch, clock_at=self.timeline.now + self.rng.random() * 1000)

    def end_engine(self, host: EngineHost, why: str, *, lingers: bool = True, away_s: float | None = None) -> None:
        if host.process.is_alive:
            self._end(host.process, why, lingers=lingers)
            self._return(away_s, self._start_engine, host.process.name)

    def _end(self, process: Process, why: str, *, lingers: bool = False) -> None:
        self.note(process.name, why)
        process.kill()
        self.network.end_process(process, lambda: 0.03 + self.rng.random() * 0.9, lingers=lingers)

    def _return(self, away_s: float | None, start: object, *names: str) -> None:
        self._num_coming += 1
        self.timeline.after(away_s or self.rng.choice([0.2, 1.0, 2.5]), self._come_back, start, *names)

    def _come_back(self, start: object, *names: str) -> None:
        self._num_coming -= 1
        start(*names)  # type: ignore[operator]

    def _start_engine(self, name: str) -> None:
        self.engines[name] = self.cast.engine(self, self.scene.engines.index(name), self._next_epoch(name))

    def _start_coordinator(self) -> None:
        self.coordinator = self.cast.coordinator(self, self._next_epoch("coordinator"))
        self.books.open_coordinator(self.coordinator)

    def _start_front(self, name: str) -> None:
        self.fronts[name] = self.cast.front(self, name, self._next_epoch(name))

    def _next_epoch(self, name: str) -> int:
        self._epochs[name] += 1
        return self._epochs[name] - 1

    # ------------------------------------------------------------ faults

    def _delay(self, path: Path) -> float:
        usual, rare, share = self.scene.delays
        seconds = usual * (0.5 + self.rng.random())
        if share and self.rng.random() < share:
            seconds += rare * self.rng.random()
        return seconds * 20 if self.timeline.now < self._slow_until.get(path, 0.0) else seconds

    def _fail(self, fault: Fault) -> None:
        self.note("FAULT", str(fault))
        target = fault.targets[0]
        process = self._process(target) if ">" not in target else None
        if process is not None:
            if process.is_alive:
                self._fail_process(fault, target, process)
        elif ">" in target:
            self._fail_links(fault)

    def _process(self, name: str) -> Process | None:
        if name == "coordinator":
            return self.coordinator.process if self.coordinator is not None else None
        host = self.engines.get(name) or self.fronts.get(name)
        return host.process if host is not None else None

    def _fail_process(self, fault: Fault, name: str, process: Process) -> None:
        if fault.kind == "kill":
            self._kill(name, fault.seconds)
        elif fault.kind == "freeze":
            process.freeze(fault.seconds)
            self.network.frozen(process)
            process.wake(fault.seconds)
        elif fault.kind == "jump":
            process.jump(fault.seconds)
        else:
            self._fail_engine(fault, self.engines[name])

    def _kill(self, name: str, away_s: float) -> None:
        if name in self.engines:
            self.end_engine(self.engines[name], "killed", lingers=False, away_s=away_s)
        elif name in self.fronts:
            host = self.fronts[name]
            self._end(host.process, "killed")
            for answer in self.answers:
                if answer.host is host and not answer.is_over:
                    answer.outcome = "gone"
            host.loop.end()
            self._return(away_s, self._start_front, name)
        elif self.coordinator is not None:
            self._end(self.coordinator.process, "killed")
            self._return(away_s, self._start_coordinator)

    def _fail_engine(self, fault: Fault, host: EngineHost) -> None:
        if fault.kind == "worker_dies":
            host.executor.fail("a worker died")
        elif fault.kind == "worker_stuck" and host.core.counters.steps:
            host.executor.is_stuck = True
        elif fault.kind == "drain":
            host.loop.drain(Drain(deadline_s=fault.seconds, notice_s=0.1))
            host.process.wake()
        elif fault.kind == "nap":
            host.loop.calls.sleep(1, lambda error: None)
            host.process.wake()

    def _fail_links(self, fault: Fault) -> None:
        paths = [(client, server) for client, server in (target.split(">") for target in fault.targets)]
        if fault.kind == "slow":
            until = self.timeline.now + fault.seconds
            self._slow_until.update({path: max(until, self._slow_until.get(path, 0.0)) for path in paths})
        elif fault.kind == "break":
            for channel in self.network.channels():
                if channel.path in paths:
                    self.network.lose(channel)
        elif fault.kind == "swizzle":
            for path in paths:
                self.timeline.after(fault.seconds * 0.5 * self.rng.random(), self.network.clog, path)
                self.timeline.after(fault.seconds * (0.5 + 0.5 * self.rng.random()), self.network.unclog, path)
        else:
            for path in paths:
                self.network.clog(path)
                self.timeline.after(fault.seconds, self.network.unclog, path)


def run_seed(seed: int, *, trace: Trace | None = None, cast: Cast | None = None) -> Result:
    """Runs one seed to its end and says what became of it. Never raises for what the product did."""
    world = World(draw_scene(seed), trace=trace, cast=cast)
    breach = ""
    try:
        world.run()
    except Breach as error:
        breach = str(error)
    except Exception as error:
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = f"{where.tb_frame.f_code.co_filename}:{where.tb_lineno}" if where is not None else "?"
        breach = f"raised: {type(error).__name__}: {error} ({line})"
    if breach:
        world.note("BREACH", breach)
    try:
        world.end()
    except RuntimeError as error:
        breach = breach or f"end: {error}"
    outcomes = Counter(answer.outcome for answer in world.answers)
    digest = trace.digest if trace is not None else 0
    return Result(seed, breach, outcomes, world.timeline.num_events, world.timeline.now, digest)
