"""The boot channel between a parent process and its child: Boot, progress, readiness, failure, drain, death.

A child module defines `main(channel: BootChannel) -> None` and nothing more; `spawn("engine_core.main", boot)` runs it in a new
process through transport/process/child.py. No orphans: a child is killed when its parent ends.

The channel is a SOCK_SEQPACKET pair with one end as the child's stdin: one packet is one message, end of file means death.
Nothing here waits for a process to end except `reap`, with a time limit: the kernel may keep a process indefinitely.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import gc
import importlib
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeAlias

import msgspec

from trireme.errors import ProtocolError, TransportError, TriremeError
from trireme.phases import Phases
from trireme.topology.lockstep import Mode
from trireme.transport.process.prespawn import Prespawned, prespawn
from trireme.transport.sockets.poller import NEVER, Waker
from trireme.transport.wire.codec import MessageDecoder, encode
from trireme.transport.wire.messages import Beat, Boot, Drain, Failed, FromChild, Paused, Progress, Ready, ToChild, Wire

log = logging.getLogger("trireme.transport")

PACKET_BYTES = 192 << 10  # under the system's default socket buffer
MAX_TEXT = 32 << 10
BEAT_S = 1.0
PROGRESS_S = 0.05
EXIT_GRACE_S = 2.0
ENDING_S = 0.5  # from the end of a channel until death is reported although the process still exists
LOOK_S = 0.01  # between checks whether it has gone

Report: TypeAlias = Progress | Ready | Failed | Paused


class Child:
    """Parent's end. A Source for Poller: readable when there are reports or the child died. One thread only."""

    def __init__(self, boot: Boot, process: subprocess.Popen[bytes], channel: socket.socket, born: float = 0.0) -> None:
        self.name = boot.name
        self.boot = boot
        self.pid = process.pid
        self.is_ready = False  # a Ready was received
        self.is_dead = False  # reported by receive(), or closed; for the process itself ask is_gone
        self.killed_at = NEVER  # time.monotonic() of the first kill
        self.last_beat = 0.0  # time.monotonic() of the last Beat; 0 before the first
        self.progress = 0  # of the last Beat
        self.born = born  # time.monotonic() when the process was ordered
        self._process = process
        self._channel = channel
        self._decoder = MessageDecoder(FromChild)
        self._failed: Failed | None = None  # its own, held back until it is dead
        self._told_by = NEVER  # the channel has ended: deadline for reporting that
        self._epoll = select.epoll()
        self._epoll.register(channel.fileno(), select.EPOLLIN)

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative signal number, or None while alive."""
        return self._process.poll()

    @property
    def is_gone(self) -> bool:
        """True when the process has ended and all its resources are free."""
        return self._process.poll() is not None

    @property
    def process_state(self) -> str:
        """The kernel's one-letter state of its process: R running, S sleeping, D uninterruptible (cannot be killed), T stopped, Z
        a zombie; "" when there is none."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                return file.read(512).rpartition(b")")[2].split()[0].decode()
        except (OSError, IndexError):
            return ""

    def is_halted(self) -> bool:
        """True while the process cannot run: stopped by a signal or a debugger, or dead."""
        state = self.process_state
        return state in "TtZX" if state else self.is_dead

    def receive(self) -> list[Report]:
        """Reports since the last call, never blocking. When the child is dead the list ends with a Failed: its own, or one that
        says how it died (signal, exit code). `is_dead` is then True. A clean exit (code 0) gives no Failed."""
        reports: list[Report] = []
        while not self.is_dead and self._told_by == NEVER:
            try:
                packet = self._channel.recv(PACKET_BYTES)
            except BlockingIOError:
                break
            except ConnectionResetError:
                packet = b""
            if not packet:
                self._epoll.unregister(self._channel.fileno())
                self.kill()
                self._told_by = time.monotonic() + ENDING_S
                break
            try:
                self._take(self._decoder.decode([packet]), reports)
            except ProtocolError as error:
                log.warning("dropped a malformed report from=%s: %s", self.name, error)
        if not self.is_dead and self._told_by != NEVER and (self.is_gone or time.monotonic() >= self._told_by):
            self._bury(reports)
        return reports

    def tell_boot(self) -> None:
        """Sends Boot, the first message."""
        fds = [self.boot.listen_fd] if self.boot.listen_fd >= 0 else []
        try:
            socket.send_fds(self._channel, [encode(self.boot)[0]], fds)
        except OSError as error:
            log.debug("could not send to=%s: %s", self.name, error)  # it is dead; receive() tells how

    def drain(self, deadline_s: float, notice_s: float = 0.0) -> None:
        """Asks the child to take new work for `notice_s` seconds, then to finish what it has within `deadline_s` and exit."""
        self._send(Drain(deadline_s, notice_s))

    def tell(self, report: Progress) -> None:
        """Forwards the startup progress of another part (frontends show it in /ready)."""
        self._send(report)

    def kill(self) -> None:
        """Sends SIGKILL without waiting for the process to end (is_gone). Its own children die with it."""
        self.killed_at = min(self.killed_at, time.monotonic())
        self._process.kill()

    def wait(self, timeout_s: float) -> bool:
        """True when the process has gone within `timeout_s`."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def poll_targets(self) -> tuple[int]:
        return (self._epoll.fileno(),)

    def acknowledge(self) -> bool:
        return True  # that may have been the end of the channel

    def tick(self, now: float) -> float:
        return NEVER if self.is_dead or self._told_by == NEVER else now + LOOK_S

    def close(self) -> None:
        """Kills a child that still lives, and closes the channel. Does not wait: see reap."""
        self.kill()
        self.is_dead = True
        self._epoll.close()
        self._channel.close()

    def _take(self, report: Any, reports: list[Report]) -> None:
        match report:
            case Beat():
                self.last_beat = time.monotonic()
                self.progress = report.progress
                return
            case Ready():
                self.is_ready = True
            case Failed():
                self._failed = report
                return
        reports.append(report)

    def _bury(self, reports: list[Report]) -> None:
        """The channel has ended: reports how the process died (one that is exiting anyway keeps its exit code)."""
        self.is_dead = True
        code = self.exit_code
        if self._failed is not None:
            reports.append(self._failed)
        elif code is None:
            error = f"{self.name} has ended, but the system keeps its process {self.pid} in state {self.process_state}"
            reports.append(Failed(self.name, error))
        elif code:
            error = f"{self.name} {describe_exit(code)}"
            hint = "the system may have run out of memory: see dmesg" if code == -signal.SIGKILL else ""
            reports.append(Failed(self.name, error, hint, exit_code=code if code > 0 else 1))

    def _send(self, message: Wire) -> None:
        try:
            self._channel.send(encode(message)[0])
        except OSError as error:
            log.debug("could not send to=%s: %s", self.name, error)


def reap(children: Iterable[Child], within_s: float) -> list[Child]:
    """Closes all children, waits up to `within_s` seconds in all until their processes have gone, and returns those that have
    not. Each of these is named in the log: its resources are free only when the kernel releases it."""
    closed = list(children)
    for child in closed:
        child.close()
    until = time.monotonic() + within_s
    left = [child for child in closed if not child.wait(max(0.0, until - time.monotonic()))]
    for child in left:
        log.error("left behind, as the system does not end it. name=%s %s", child.name, told_process(child))
    return left


def told_process(child: Child) -> str:
    """`pid=17 state=D`, for the log."""
    return f"pid={child.pid} state={child.process_state}"


def describe_exit(code: int) -> str:
    """`was killed by SIGSEGV`, `ended with exit code 3`."""
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def spawn(module: str, boot: Boot, *, prespawned: Prespawned | None = None) -> Child:
    """Starts a process that runs `module` with `boot`, or hands `boot` to a prespawned one. A listening socket is passed along;
    its descriptor number in the child differs. For threads see prespawn. Raises TransportError."""
    try:
        prespawned = prespawned or prespawn(module, boot.name)
    except OSError as error:
        raise TransportError(f"cannot start {boot.name}: {error}") from error
    prespawned.channel.setblocking(False)
    child = Child(boot, prespawned.process, prespawned.channel, prespawned.born)
    child.tell_boot()
    return child


class BootChannel:
    """Child's end, passed to `main`. Reports may be sent from any thread. A Source for Poller: readable when a Drain came.

    SIGINT and SIGTERM are ignored in a child: its parent decides, through Drain and SIGKILL.
    """

    boot: Boot  # set once `begin` has returned

    def __init__(self, name: str, channel: socket.socket, began: float | None = None) -> None:
        self._name = name
        self._channel = channel
        self._lock = threading.Lock()
        self._drains: deque[Drain] = deque()
        self._news: deque[Progress] = deque(maxlen=64)
        self._waker = Waker()
        self._last_progress = 0.0
        self._next_beat = 0.0
        self.phases = Phases(began)

    def begin(self) -> None:
        """Waits for Boot, then watches the parent."""
        packet, fds, _, _ = socket.recv_fds(self._channel, PACKET_BYTES, 1)
        if not packet:
            os._exit(0)  # the parent died before it sent Boot
        boot = MessageDecoder(ToChild).decode([packet])
        if not isinstance(boot, Boot):
            raise ProtocolError(f"a child's first message must be Boot, not {type(boot).__name__}")
        self.boot = msgspec.structs.replace(boot, listen_fd=fds[0]) if fds else boot
        if boot.name != self._name:  # prespawned as a spare
            self._name = boot.name
            with contextlib.suppress(OSError):
                Path("/proc/self/comm").write_text(boot.name[:15])
        threading.Thread(target=self._watch_parent, name="boot", daemon=True).start()

    def progress(self, phase: str, done: int, total: int) -> None:
        """Reports startup progress (at most 20 a second reach the parent; the last one of a phase always does)."""
        self.forward(Progress(self._name, phase, done, total))

    def forward(self, report: Progress) -> None:
        """Forwards a grandchild's progress, under the same rate limit."""
        now = time.monotonic()
        if report.done >= report.total or now - self._last_progress >= PROGRESS_S:
            self._last_progress = now
            self._send(report)

    def ready(
        self,
        facts: dict[str, Any] | None = None,
        decisions: list[tuple[str, str, str]] | None = None,
    ) -> None:
        """Reports that this process is ready. Re-enables garbage collection, which child.py disabled."""
        settle_memory()
        self.phases.end("links")
        self._send(Ready(self._name, facts or {}, self.phases.seconds, decisions or [], self.phases.began))

    def beat(self, progress: int) -> None:
        """Called by the main loop on every iteration (cheap; sends once a second). A child that has sent a beat once and then
        stays silent for longer than the parent allows is killed and restarted."""
        now = time.monotonic()
        if now >= self._next_beat:
            self._next_beat = now + BEAT_S
            self._send(Beat(progress), socket.MSG_DONTWAIT)

    def paused(self, mode: Mode) -> None:
        """Reports the pause mode in which the next incarnation of this engine must begin."""
        self._send(Paused(mode), socket.MSG_DONTWAIT)

    def fail(self, error: BaseException | Failed) -> NoReturn:
        """Reports the error (or a grandchild's Failed unchanged) and ends this process at once."""
        failed = error if isinstance(error, Failed) else failed_from_error(self._name, error)
        self._send(failed)
        end_process(failed.exit_code)

    def receive(self) -> list[Drain]:
        """Drain requests since the last call, never blocking."""
        drains = []
        while self._drains:
            drains.append(self._drains.popleft())
        return drains

    def news(self) -> list[Progress]:
        """Startup progress of other parts since the last call, never blocking; older entries are dropped."""
        news = []
        while self._news:
            news.append(self._news.popleft())
        return news

    def fileno(self) -> int:
        """For asyncio's add_reader; call acknowledge() in the reader, then receive()."""
        return self._waker.fileno()

    def poll_targets(self) -> tuple[int]:
        return (self._waker.fileno(),)

    def acknowledge(self) -> bool:
        return self._waker.acknowledge()

    def tick(self, now: float) -> float:
        return NEVER

    def _send(self, message: Wire, flags: int = 0) -> None:
        try:
            with self._lock:
                self._channel.send(encode(message)[0], flags)
        except OSError:
            pass  # the parent is gone or stopped; the watcher handles it

    def _watch_parent(self) -> None:
        """Own thread: ends this process when its parent does, whatever it is doing."""
        decoder = MessageDecoder(ToChild)
        while True:
            try:
                packet = self._channel.recv(PACKET_BYTES)
            except OSError:
                packet = b""
            if not packet:
                break
            try:
                message = decoder.decode([packet])
            except ProtocolError as error:
                log.warning("dropped a malformed order: %s", error)
                continue
            if isinstance(message, Drain):
                self._drains.append(message)
                self._waker.set()
            elif isinstance(message, Progress):
                self._news.append(message)
                self._waker.set()
        os.kill(os.getpid(), signal.SIGKILL)


def settle_memory() -> None:
    """Returns the garbage of a start to the system. What remains lives as long as the process, so the collector skips it."""
    gc.collect()
    gc.freeze()
    gc.enable()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's
    if trim is not None:
        trim(0)


def attach(name: str, began: float | None = None) -> BootChannel:
    """Takes the boot channel from stdin. Called once, by run_child."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    channel = socket.socket(fileno=os.dup(0))
    with open(os.devnull) as nothing:
        os.dup2(nothing.fileno(), 0)
    return BootChannel(name, channel, began)


def run_child(module: str, name: str, also: Sequence[str] = (), began: float | None = None) -> NoReturn:
    """Imports `module`, and `also` what it will need later, waits for Boot and runs `module.main(channel)`. Reports any exception
    as Failed, and ends the process."""
    channel = attach(name, began)
    try:
        imported = importlib.import_module(module)
        for later in also:
            importlib.import_module(later)
        channel.phases.end("import")
        channel.begin()
        channel.phases.end("settings")
        imported.main(channel)
    except SystemExit as error:
        end_process(error.code if isinstance(error.code, int) else 0 if error.code is None else 1)
    except BaseException as error:
        channel.fail(error)
    end_process(0)


def failed_from_error(source: str, error: BaseException) -> Failed:
    """The Failed that describes `error`."""
    trace = "".join(traceback.format_exception(error))[-MAX_TEXT:]
    if isinstance(error, TriremeError):
        return Failed(source, error.message[:MAX_TEXT], error.hint[:MAX_TEXT], trace, error.exit_code)
    return Failed(source, f"{type(error).__name__}: {error}"[:MAX_TEXT], "", trace, 1)


def end_process(code: int) -> NoReturn:
    """Ends without joining threads, after queued messages were sent (at most EXIT_GRACE_S)."""
    timer = threading.Timer(EXIT_GRACE_S, os._exit, (code,))
    timer.daemon = True
    timer.start()
    zmq = sys.modules.get("zmq")
    if zmq is not None and threading.current_thread() is threading.main_thread():
        zmq.Context.instance().destroy(linger=int(EXIT_GRACE_S * 500))
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()
    os._exit(code)
