"""The supervisor: starts coordinator, engines and frontends, then monitors, restarts and stops them. No request passes through.

Used by `trireme serve` (run, with signals) and by LLM (start and step, without). Events are reported through `notify`; it prints
nothing itself. Owns the listening socket and the run directory; both end with it.
"""

from __future__ import annotations

import contextlib
import hashlib
import signal
import socket
import time
from collections.abc import Callable
from typing import Literal, TypeAlias

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.processes.beats import Beats
from trireme.launch.processes.interrupts import catch_signals, release_signals
from trireme.launch.processes.leftovers import Leftovers
from trireme.launch.processes.lockstep_memory import LockstepMemory
from trireme.launch.processes.parts import Modules, parts_of
from trireme.launch.processes.restarts import COORDINATOR_LIMITS, RestartLimits, Restarts
from trireme.netloc import without_brackets
from trireme.settings import without_keys
from trireme.topology.lockstep import Mode
from trireme.topology.zones import engines_of_front
from trireme.transport.process.boot import Child, spawn
from trireme.transport.process.prespawn import Prespawned, prespawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.address import make_secret_keys
from trireme.transport.sockets.poller import NEVER, Poller, Waker
from trireme.transport.wire.messages import Boot, Failed, Paused, Progress, Ready, Role

# Their next incarnation is prespawned with imports done, so that it need not import under load.
SPARE_ROLES = ("coordinator",)
AWAY_S = 2.0  # later than its deadline: the supervisor itself, and perhaps every process, was stopped

PartState = Literal["new", "starting", "ready", "waiting", "down", "stopped"]


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


class Died(msgspec.Struct, frozen=True):
    """A part died after the first start. `restart_s`: seconds until its restart; None: it stays down."""

    name: str
    error: str
    restart_s: float | None
    num_recent: int
    failed: Failed | None = None


class AllReady(msgspec.Struct, frozen=True):
    """Every part has sent Ready for the first time. `address` is (host, port), None without frontends; the timestamps are
    readings of time.monotonic."""

    address: tuple[str, int] | None
    parts: dict[str, Ready]
    seconds: float
    ready_at: dict[str, float] = {}
    addresses: list[tuple[str, int]] = []  # all of them
    born_at: dict[str, float] = {}  # when each part's process was ordered


class Restarted(msgspec.Struct, frozen=True):
    """A part that had died is ready again."""

    name: str
    epoch: int


class Stopping(msgspec.Struct, frozen=True):
    """The drain has begun."""

    reason: str
    deadline_s: float


class Stopped(msgspec.Struct, frozen=True):
    """The last event. `failed` is the root cause, to be printed once, now."""

    exit_code: int
    failed: Failed | None


Event: TypeAlias = Progress | Ready | Died | AllReady | Restarted | Stopping | Stopped


class ManagedProcess:
    """One part of the deployment over its incarnations."""

    def __init__(self, role: Role, index: int, name: str, module: str, limits: RestartLimits, beats: Beats) -> None:
        self.role = role
        self.index = index
        self.name = name
        self.module = module
        self.epoch = -1
        self.state: PartState = "new"
        self.child: Child | None = None
        self.ready: Ready | None = None
        self.failed: Failed | None = None  # of its last death
        self.restarts = Restarts(limits)
        self.started_at = 0.0
        self.ready_at = 0.0
        self.start_s = 0.0  # duration of its last start
        self.restart_at = NEVER
        self.last_progress: Progress | None = None
        self.pause: Mode = ""  # of an engine, over its incarnations
        self.beats = beats
        self.is_hurried = False  # a frontend told to end its requests at once


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
        self.address: tuple[str, int] | None = None
        self._notify = notify
        self._prespawned = prespawned if prespawned is not None else {}
        self._spares: dict[str, Prespawned] = {}
        self._parts = self._make_parts(
            modules or Modules(), config.serving.api_servers if num_fronts is None else num_fronts
        )
        self._config_bytes = msgspec.msgpack.encode(config)
        self._public_config = msgspec.msgpack.encode(without_keys(config))
        self._poller = Poller()
        self._waker = Waker()
        self._poller.add(self._waker, lambda: None)
        self._run_dir: RunDir | None = None
        self._listeners: list[socket.socket] = []  # one for all frontends, or one each
        self._secret_keys: dict[str, bytes] = {}
        self._peers = LockstepMemory(config)
        self._started_at = 0.0
        self._turn_due = NEVER  # when the current wait, or the owner's work between two steps, should be over
        self._phase: Literal["running", "draining", "leaving"] = "running"
        self._phase_ends = NEVER
        self._streams_end = NEVER  # the drain deadline
        self._leftovers = Leftovers(self.timing.undying_s)
        self._stop_requests: list[tuple[str, float, int | None]] = []

    # ------------------------------------------------------------ for the owner

    @property
    def parts(self) -> tuple[ManagedProcess, ...]:
        """In start order. For reading only."""
        return self._parts

    def boot_for(self, role: Role, name: str, index: int = 0, epoch: int = 0, pause: Mode = "") -> Boot:
        """The Boot of a process of this deployment, but for API keys; also for a client, in this process (LLM) or another."""
        if self._run_dir is None:
            raise ConfigError("the deployment has not been started")
        return Boot(
            role=role,
            name=name,
            epoch=epoch,
            config=self._public_config,
            config_hash=hashlib.sha256(self._public_config).digest(),
            run_dir=self._run_dir.path,
            index=index,
            listen_fd=self._listeners[index % len(self._listeners)].fileno()
            if role == "front" and self._listeners
            else -1,
            secret_keys=self._secret_keys,
            peers=self._peers.path if role == "engine" else "",
            pause=pause,
        )

    def start(self) -> None:
        """Binds the listening socket, then starts every part. Raises ConfigError when the address is unavailable."""
        self._started_at = time.monotonic()
        if any(part.role == "front" for part in self._parts):
            self._listen()
        self._run_dir = RunDir()
        if self.config.launch.transport == "tcp":
            self._secret_keys = make_secret_keys()
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
            if self._run_dir is None:
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
        while self._spares:
            self._spares.popitem()[1].discard()
        for listener in self._listeners:
            listener.close()
        self._listeners.clear()
        self._peers.close()
        if self._run_dir is not None:
            self._run_dir.remove()

    @property
    def addresses(self) -> list[tuple[str, int]]:
        """Where frontends listen: one for all of them, or one for each."""
        return [listener.getsockname()[:2] for listener in self._listeners]

    def _listen(self) -> None:
        serving, is_shared = self.config.serving, self.config.coordinator.load_balancing == "internal"
        for i in range(1 if is_shared else serving.api_servers):
            self._listeners.append(listen(serving.host, serving.port + i if serving.port else 0))
        self.address = self.addresses[0]

    # ------------------------------------------------------------ parts

    def _make_parts(self, modules: Modules, num_fronts: int) -> tuple[ManagedProcess, ...]:
        places = parts_of(self.config.parallel.dp, num_fronts, modules)
        timing = self.timing
        limits = {"coordinator": timing.coordinator, "engine": timing.restarts, "front": timing.restarts}
        return tuple(ManagedProcess(*place, limits[place.role], Beats(timing.stuck_s)) for place in places)

    def _launch(self, part: ManagedProcess) -> None:
        """Starts the next incarnation of `part`, in place: same name, same addresses, next epoch."""
        part.epoch += 1
        if part.role == "engine":
            self._peers.join(part.epoch)
        boot = self.boot_for(part.role, part.name, part.index, part.epoch, part.pause)
        if part.role == "front":  # only frontends check keys
            boot = msgspec.structs.replace(boot, config=self._config_bytes)
        part.state, part.started_at, part.restart_at = "starting", time.monotonic(), NEVER
        part.child = spawn(part.module, boot, prespawned=self._prespawned_for(part))
        self._poller.add(part.child, lambda: self._on_reports(part))

    def _prespawned_for(self, part: ManagedProcess) -> Prespawned | None:
        prespawned = self._prespawned.pop(part.name, None) or self._spares.pop(part.name, None)
        if prespawned is not None and prespawned.process.poll() is not None:
            prespawned.discard()
            return None
        return prespawned

    def _keep_spares(self) -> None:
        for part in self._parts:
            if part.role in SPARE_ROLES and part.name not in self._spares and self._phase == "running":
                with contextlib.suppress(OSError):
                    self._spares[part.name] = prespawn(part.module, f"spare-{part.name}")

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
            self._keep_spares()
            return
        self._notify(report)
        if all(p.state == "ready" for p in self._parts):
            self.is_ready = True
            ready = {p.name: p.ready for p in self._parts if p.ready is not None}
            stamps = {p.name: p.ready_at for p in self._parts}
            born = {p.name: p.child.born for p in self._parts if p.child is not None}
            seconds = time.monotonic() - self._started_at
            self._notify(AllReady(self.address, ready, seconds, stamps, self.addresses, born))
            self._keep_spares()

    def _on_death(self, part: ManagedProcess, failed: Failed | None) -> None:
        """Before the first readiness a death is fatal, later it is a restart; in a drain too, if there is time for one. A part
        that was told to exit has done so."""
        was_ready = part.state == "ready"
        self._discard(part, "stopped")
        part.failed = failed
        if self._phase == "leaving" or (self._phase == "draining" and part.role == "front"):
            return
        failed = failed or Failed(part.name, f"{part.name} ended although nobody asked it to")
        if not self.is_ready:
            self._abort(failed)
            return
        now = time.monotonic()
        counts = was_ready or not self._leftovers.holds(part.name)  # else it may lack the memory still held
        delay_s = part.restarts.note_death(now, now - part.ready_at if was_ready else 0.0, counts=counts)
        if delay_s is not None and not self._has_time(part, now + delay_s):
            delay_s = None
        if delay_s is None:
            part.state = "down"
        else:
            part.state, part.restart_at = "waiting", now + delay_s
        self._notify(Died(part.name, failed.error, delay_s, part.restarts.num_recent, failed))
        if part.role == "engine" and self._peers.is_shared:
            self._end_group(part)
        if self._phase == "draining":
            self._hurry_fronts()
            return
        alike = [p for p in self._parts if p.role == part.role]
        if part.role != "coordinator" and all(p.state == "down" for p in alike):
            self._abort(failed)  # nothing is left that could serve again

    def _end_group(self, dead: ManagedProcess) -> None:
        """Engines in lockstep end together, and are restarted together with the one that died."""
        self._peers.abort()
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
        deadlines = [self._phase_ends, self._leftovers.next_due(now)]
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
        self._advance_stop(now)

    def _check_beats(self, part: ManagedProcess, now: float) -> None:
        """Kills a part whose loop has sent no beat for too long."""
        if part.child is None:
            return
        part.beats.look(part.child, now)
        if part.beats.is_stuck(part.child, now):
            self._on_reports(part)  # beats may be unread when the supervisor itself was stopped
            if part.child is not None and part.beats.is_stuck(part.child, now):
                self._kill(part, f"{part.name} made no turn of its loop for {self.timing.stuck_s:g} s")

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

    # ------------------------------------------------------------ stopping

    def _on_stop_request(self, reason: str, notice_s: float, exit_code: int | None) -> None:
        if self._phase != "running" or not self.is_ready:
            self.is_finished = True  # a second request, or nothing to drain yet
            if exit_code is None:
                exit_code = 130 if self._phase != "running" else 0
            self.exit_code = self.exit_code or exit_code
            return
        serving = self.config.serving
        self._phase = "draining"
        self._streams_end = time.monotonic() + notice_s + serving.drain_timeout
        self._phase_ends = self._streams_end + self.timing.cleanup_s
        for part in self._parts:
            if part.state == "waiting" and not self._has_time(part, part.restart_at):
                part.state, part.restart_at = "down", NEVER
            if part.role == "front" and part.child is not None:
                part.child.drain(serving.drain_timeout, notice_s)
        self._notify(Stopping(reason, notice_s + serving.drain_timeout))
        self._hurry_fronts()

    def _has_time(self, part: ManagedProcess, restart_at: float) -> bool:
        """Whether an incarnation that begins then would still be useful: in a drain, to requests not yet finished."""
        if self._phase == "running":
            return True
        return part.role != "front" and restart_at + part.start_s < self._streams_end

    def _hurry_fronts(self) -> None:
        """Ends the requests of a draining frontend at once when none of its engines will come back."""
        lost = {part.index for part in self._parts if part.role == "engine" and part.state in ("down", "stopped")}
        for part in self._parts:
            if part.role == "front" and part.child is not None and not part.is_hurried:
                part.is_hurried = lost.issuperset(engines_of_front(self.config, part.index))
                if part.is_hurried:
                    part.child.drain(0.0)

    def _advance_stop(self, now: float) -> None:
        """draining (frontends finish their streams) -> leaving (engines and coordinator go) -> finished."""
        if self._phase == "draining":
            fronts_live = any(part.child is not None for part in self._parts if part.role == "front")
            if not fronts_live or now >= self._phase_ends:
                self._phase = "leaving"
                self._phase_ends = now + self.timing.leave_s
                for part in self._parts:
                    part.restart_at = NEVER
                    if part.child is not None:
                        part.child.drain(self.timing.leave_s)
        if self._phase == "leaving" and (now >= self._phase_ends or all(part.child is None for part in self._parts)):
            self.is_finished = True


_EVERYWHERE = ("::", "*", "")


def listen(host: str, port: int) -> socket.socket:
    """The listening socket of the HTTP port; for ::, * or no host on every address, IPv4 included. Raises ConfigError when it is
    taken or not allowed."""
    name = without_brackets(host)
    try:
        if name in _EVERYWHERE and socket.has_dualstack_ipv6():
            return socket.create_server(("::", port), family=socket.AF_INET6, backlog=2048, dualstack_ipv6=True)
        wanted = None if name in ("*", "") else name
        found = socket.getaddrinfo(wanted, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        return socket.create_server(address, family=family, backlog=2048)  # with its scope id
    except (OSError, UnicodeError) as error:
        is_of_host = isinstance(error, socket.gaierror | UnicodeError)
        reason = "this is no host name" if isinstance(error, UnicodeError) else error.strerror or error
        raise ConfigError(
            f"cannot listen on {host} port {port}: {reason}",
            hint="--host 127.0.0.1, or 0.0.0.0 for all addresses"
            if is_of_host
            else f"--port {port + 1 if port < 65535 else 0}, or --port 0 for a free one",
        ) from error
