"""The supervisor: starts coordinator, engines and frontends, then monitors, restarts and stops them. No request passes through.

Used by `trireme serve` (run, with signals) and by LLM (start and step, without). Events are reported through `notify`; it prints
nothing itself. Owns the listening sockets and the run directory (boots.py), which end with it.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable

import msgspec

from trireme.config import EngineConfig
from trireme.launch.processes.beats import Beats
from trireme.launch.processes.boots import Boots
from trireme.launch.processes.events import AllReady, Died, Event, Restarted, Stopped, Stopping
from trireme.launch.processes.interrupts import catch_signals, release_signals
from trireme.launch.processes.leftovers import Leftovers
from trireme.launch.processes.lockstep_memory import LockstepMemory
from trireme.launch.processes.managed_process import ManagedProcess, PartState
from trireme.launch.processes.parts import Modules, parts_of
from trireme.launch.processes.restarts import COORDINATOR_LIMITS, RestartLimits
from trireme.launch.processes.shutdown import Shutdown
from trireme.launch.processes.spares import Spares
from trireme.topology.lockstep import Mode
from trireme.transport.process.boot import spawn
from trireme.transport.process.prespawn import Prespawned
from trireme.transport.sockets.poller import NEVER, Poller, Waker
from trireme.transport.wire.messages import Boot, Failed, Paused, Progress, Ready, Role

AWAY_S = 2.0  # later than its deadline: the supervisor itself, and perhaps every process, was stopped


class SupervisorTimeouts(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits of the supervisor, in seconds."""

    restarts: RestartLimits = RestartLimits()  # of engines and frontends
    coordinator: RestartLimits = COORDINATOR_LIMITS
    stuck_s: float = 15.0  # between two beats of a child that beats
    cleanup_s: float = 10.0  # for a frontend beyond its drain deadline
    after_engines_s: float = 1.0  # for a frontend to become ready once the engines are
    leave_s: float = 5.0  # for engines and coordinator to exit after the frontends
    undying_s: float = 10.0  # for a killed process to go before its next incarnation begins anyway
    close_s: float = 3.0  # for remaining processes to go before they are abandoned


class Supervisor:
    """All processes of one deployment. One thread only, except request_stop.

    `supervisor.run()` does everything until the end and returns the exit code. Without signals: `start()`, then `step()`
    until `is_ready` or `is_finished`, later `close()`.
    """

    def __init__(
        self,
        config: EngineConfig,
        notify: Callable[[Event], None],
        *,
        modules: Modules | None = None,
        num_fronts: int | None = None,
        timing: SupervisorTimeouts | None = None,
        prespawned: dict[str, Prespawned] | None = None,
    ) -> None:
        """`num_fronts` replaces config.serving.api_servers (0: no HTTP, no listening socket). `prespawned` are processes waiting
        to become the parts of those names; they stay the caller's until then."""
        self.config = config
        self.timing = timing or SupervisorTimeouts()
        self.is_ready = False  # all parts have been ready once
        self.is_finished = False
        self.failed: Failed | None = None
        self.exit_code = 0
        self._notify = notify
        self._parts = self._make_parts(
            modules or Modules(), config.serving.api_servers if num_fronts is None else num_fronts
        )
        self._lockstep_memory = LockstepMemory(config)
        self._boots = Boots(config, self._lockstep_memory)
        self._spares = Spares(prespawned)
        self._leftovers = Leftovers(self.timing.undying_s)
        self._shutdown = Shutdown(config, self._parts, cleanup_s=self.timing.cleanup_s, leave_s=self.timing.leave_s)
        self._stop_requests: list[tuple[str, float, int | None]] = []
        self._poller = Poller()
        self._waker = Waker()
        self._poller.add(self._waker, lambda: None)
        self._started_at = 0.0
        self._turn_due = NEVER  # when the current wait, or the owner's work between two steps, should be over

    # ------------------------------------------------------------ for the owner

    @property
    def parts(self) -> tuple[ManagedProcess, ...]:
        """In start order. For reading only."""
        return self._parts

    @property
    def address(self) -> tuple[str, int] | None:
        """Where the first frontend listens; None without frontends."""
        return self._boots.listeners.address

    def boot_for(self, role: Role, name: str, index: int = 0, epoch: int = 0, pause: Mode = "") -> Boot:
        """The Boot of a process of this deployment, but for API keys; also for a client, in this process (LLM) or another."""
        return self._boots.for_client(role, name, index, epoch, pause)

    def start(self) -> None:
        """Binds the listening socket, then starts every part. Raises ConfigError when the address is unavailable."""
        self._started_at = time.monotonic()
        self._boots.open(has_fronts=any(part.role == "front" for part in self._parts))
        for part in self._parts:
            self._launch(part)

    def step(self, timeout_s: float | None = None) -> None:
        """Waits for the next event, at most `timeout_s`, and handles it."""
        now = time.monotonic()
        self._note_turn(now)
        wait_s = max(0.0, self._next_deadline() - now)
        if timeout_s is not None:
            wait_s = min(wait_s, timeout_s)
        self._turn_due = now + wait_s
        self._poller.wait(None if wait_s == NEVER else wait_s)
        self._note_turn(time.monotonic())
        self._check(time.monotonic())
        self._turn_due = time.monotonic()

    def _note_turn(self, now: float) -> None:
        """After a stop of the whole deployment (SIGSTOP, suspend) no part is to blame: restarts the clock of every beat."""
        if now - self._turn_due > AWAY_S:
            for part in self._parts:
                if part.child is not None and part.child.last_beat:
                    part.child.last_beat = now

    def request_stop(self, reason: str, notice_s: float = 0.0, *, exit_code: int | None = None) -> None:
        """Begins the drain, which ends with exit code 0: frontends take new requests for `notice_s` more seconds. A second call
        kills, and so does one before there is anything to drain; then it ends with `exit_code`. Safe from any thread and from
        signal handlers."""
        self._stop_requests.append((reason, notice_s, exit_code))
        self._waker.set()

    def stop_by_signal(self, number: int) -> None:
        """SIGTERM drains with notice, any other signal without; a second signal kills."""
        notice_s = self.config.serving.drain_notice if number == signal.SIGTERM else 0.0
        self.request_stop(signal.Signals(number).name, notice_s, exit_code=128 + number)

    def run(self) -> int:
        """Starts unless already started, serves until a signal or a fatal failure, stops; returns the exit code. Call from the
        main thread."""
        former = catch_signals(lambda number, _: self.stop_by_signal(number))
        try:
            if not self._boots.is_open:
                self.start()
            while not self.is_finished:
                self.step()
        finally:
            self.close()
            release_signals(former)
        self._notify(Stopped(self.exit_code, self.failed))
        return self.exit_code

    def close(self) -> None:
        """Kills remaining processes and removes all files; a process that the kernel keeps is named and abandoned. May be called
        twice."""
        self.is_finished = True
        for part in reversed(self._parts):
            self._discard(part, "stopped")
        self._leftovers.close(self.timing.close_s)
        self._spares.close()
        self._lockstep_memory.close()
        self._boots.close()

    # ------------------------------------------------------------ parts

    def _make_parts(self, modules: Modules, num_fronts: int) -> tuple[ManagedProcess, ...]:
        timing = self.timing
        limits = {"coordinator": timing.coordinator, "engine": timing.restarts, "front": timing.restarts}
        ids = parts_of(self.config.parallel.dp, num_fronts, modules)
        return tuple(ManagedProcess(*part_id, limits[part_id.role], Beats(timing.stuck_s)) for part_id in ids)

    def _launch(self, part: ManagedProcess) -> None:
        """Starts the next incarnation of `part`, in place: same name, same addresses, next epoch."""
        part.epoch += 1
        if part.role == "engine":
            self._lockstep_memory.join(part.epoch)
        boot = self._boots.for_part(part.role, part.name, part.index, part.epoch, part.pause)
        part.state, part.started_at, part.restart_at = "starting", time.monotonic(), NEVER
        part.child = spawn(part.module, boot, prespawned=self._spares.take(part.name))
        self._poller.add(part.child, lambda: self._on_reports(part))

    def _refill_spares(self) -> None:
        if self._shutdown.phase == "running":
            self._spares.refill(self._parts)

    def _on_reports(self, part: ManagedProcess) -> None:
        child = part.child
        if child is None:
            return
        failed: Failed | None = None
        for report in child.receive():
            match report:
                case Progress():
                    part.last_progress = report
                    self._tell_fronts(part, report)
                    self._notify(report)
                case Ready():
                    self._on_ready(part, report)
                case Paused():
                    part.pause = report.mode
                case Failed():
                    failed = report
        if child.is_dead:
            self._on_death(part, failed)

    def _tell_fronts(self, part: ManagedProcess, report: Progress) -> None:
        """Forwards an engine's load progress to the frontends, which report it in /ready."""
        for front in self._parts:
            if part.role == "engine" and front.role == "front" and front.child is not None:
                front.child.tell(report)

    def _on_ready(self, part: ManagedProcess, report: Ready) -> None:
        part.state, part.ready, part.ready_at = "ready", report, time.monotonic()
        part.start_s = part.ready_at - part.started_at
        if self.is_ready:
            self._notify(Restarted(part.name, part.epoch))
            self._refill_spares()
            return
        self._notify(report)
        if all(p.state == "ready" for p in self._parts):
            self.is_ready = True
            ready = {p.name: p.ready for p in self._parts if p.ready is not None}
            stamps = {p.name: p.ready_at for p in self._parts}
            born = {p.name: p.child.born for p in self._parts if p.child is not None}
            seconds = time.monotonic() - self._started_at
            addresses = self._boots.listeners.addresses
            self._notify(AllReady(self.address, ready, seconds, stamps, addresses, born))
            self._refill_spares()

    def _on_death(self, part: ManagedProcess, failed: Failed | None) -> None:
        """Before the first readiness a death is fatal, later it is a restart; in a drain too, if there is time for one. A part
        that was told to exit has done so."""
        was_ready = part.state == "ready"
        self._discard(part, "stopped")
        part.failed = failed
        phase = self._shutdown.phase
        if phase == "leaving" or (phase == "draining" and part.role == "front"):
            return
        failed = failed or Failed(part.name, f"{part.name} ended although nobody asked it to")
        if not self.is_ready:
            self._abort(failed)
            return
        now = time.monotonic()
        counts = was_ready or not self._leftovers.holds(part.name)  # else it may lack the memory still held
        delay_s = part.restarts.note_death(now, now - part.ready_at if was_ready else 0.0, counts=counts)
        if delay_s is not None and not self._shutdown.has_time(part, now + delay_s):
            delay_s = None
        if delay_s is None:
            part.state = "down"
        else:
            part.state, part.restart_at = "waiting", now + delay_s
        self._notify(Died(part.name, failed.error, delay_s, part.restarts.num_recent, failed))
        if part.role == "engine" and self._lockstep_memory.is_shared:
            self._end_group(part)
        if phase == "draining":
            self._shutdown.hurry_fronts()
            return
        alike = [p for p in self._parts if p.role == part.role]
        if part.role != "coordinator" and all(p.state == "down" for p in alike):
            self._abort(failed)  # nothing is left that could serve again

    def _end_group(self, dead: ManagedProcess) -> None:
        """Engines in lockstep end together, and are restarted together with the one that died."""
        self._lockstep_memory.abort()
        for part in self._parts:
            if part.role == "engine" and part is not dead:
                self._discard(part, dead.state)
                part.restart_at = dead.restart_at

    def _discard(self, part: ManagedProcess, state: PartState) -> None:
        if part.child is not None:
            self._poller.remove(part.child)
            part.child.close()
            self._leftovers.add(part.child)
            part.child = None
        part.state, part.restart_at = state, NEVER

    def _kill(self, part: ManagedProcess, error: str) -> None:
        self._on_death(part, Failed(part.name, error))

    def _abort(self, failed: Failed) -> None:
        """Records the first failure as the root cause; consequences in the same iteration are ignored."""
        if self.is_finished:
            return
        self.failed = failed
        self.exit_code = failed.exit_code or 1
        self.is_finished = True

    # ------------------------------------------------------------ time

    def _next_deadline(self) -> float:
        now = time.monotonic()
        deadlines = [self._shutdown.phase_ends, self._leftovers.next_due(now)]
        for part in self._parts:
            if part.restart_at > now or not self._leftovers.is_going(part.name, now):
                deadlines.append(part.restart_at)
            if part.state == "starting":
                deadlines.append(self._start_ends(part))
            if part.child is not None:
                deadlines.append(part.beats.next_due(part.child))
        return min(deadlines)

    def _check(self, now: float) -> None:
        """Handles everything that is due by time, and the stop requests."""
        self._leftovers.look(now)
        for part in self._parts:
            if part.restart_at <= now:
                if not self._leftovers.is_going(part.name, now):
                    self._launch(part)
            elif part.state == "starting" and now >= self._start_ends(part):
                self._kill(part, self._describe_slow_start(part))
            else:
                self._check_beats(part, now)
        while self._stop_requests:
            self._on_stop_request(*self._stop_requests.pop(0))
        if self._shutdown.advance(now):
            self.is_finished = True

    def _on_stop_request(self, reason: str, notice_s: float, exit_code: int | None) -> None:
        is_running = self._shutdown.phase == "running"
        if not is_running or not self.is_ready:
            self.is_finished = True  # a second request, or nothing to drain yet
            if exit_code is None:
                exit_code = 0 if is_running else 130
            self.exit_code = self.exit_code or exit_code
            return
        self._shutdown.begin(time.monotonic(), notice_s)
        self._notify(Stopping(reason, notice_s + self.config.serving.drain_timeout))
        self._shutdown.hurry_fronts()

    def _check_beats(self, part: ManagedProcess, now: float) -> None:
        """Kills a part whose loop has sent no beat for too long."""
        if part.child is None:
            return
        part.beats.look(part.child, now)
        if part.beats.is_stuck(part.child, now):
            self._on_reports(part)  # beats may be unread when the supervisor itself was stopped
            if part.child is not None and part.beats.is_stuck(part.child, now):
                self._kill(part, f"{part.name} made no iteration of its loop for {self.timing.stuck_s:g} s")

    def _start_ends(self, part: ManagedProcess) -> float:
        """The start deadline of a part. A frontend waits for the engines, so its own is later than those of engines still
        starting."""
        awaited = [p.started_at for p in self._parts if p.role == "engine" and p.state == "starting"]
        ends = part.started_at
        if part.role == "front" and awaited:
            ends = max(ends, max(awaited) + self.timing.after_engines_s)
        return ends + self.config.launch.start_timeout

    def _describe_slow_start(self, part: ManagedProcess) -> str:
        text = f"{part.name} did not become ready within {self.config.launch.start_timeout:g} s"
        last = part.last_progress
        return f"{text}; its last step was {last.phase} {last.done}/{last.total}" if last else text
