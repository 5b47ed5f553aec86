"""`trireme serve`: resolves the settings, passes them to the supervisor, and shows events on the console. Called by
launch/processes/parts.py, which has already prespawned the processes.

Prints each failure once, last. No request passes through this process.
"""

from __future__ import annotations

import logging
import shlex
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import msgspec

from trireme import __version__, log
from trireme.config import Decision, EngineConfig
from trireme.launch.api.startup import breakdown, line_of, lives_of, process_began
from trireme.launch.cli import print_error
from trireme.launch.options import Invocation
from trireme.launch.processes.connection_file import write_pass
from trireme.launch.processes.events import AllReady, Died, Event, Restarted, Stopped, Stopping
from trireme.launch.processes.interrupts import StartGuard
from trireme.launch.processes.supervisor import Supervisor
from trireme.netloc import is_loopback, netloc
from trireme.phases import PART
from trireme.resolve import Prepared, describe, prepare
from trireme.settings import to_yaml
from trireme.sizes import format_bytes
from trireme.topology.zones import engines_of_front
from trireme.transport.process.boot import settle_memory
from trireme.transport.process.prespawn import Prespawned
from trireme.transport.wire.messages import Boot, Failed, Progress, Ready

if TYPE_CHECKING:
    from trireme.launch.console import Console

_log = logging.getLogger("trireme.launch")
# hosts that listen on all interfaces, IPv6 for both families (launch/processes/listeners.py)
_ANY_ADDRESS = ("0.0.0.0", "::")


def run(
    invocation: Invocation, prespawned: dict[str, Prespawned], pipe: tuple[int, int] | None, guard: StartGuard
) -> int:
    """Serves until a signal or a fatal failure; returns the exit status. `prespawned` are processes by part name; unused ones
    stay in it. They write to `pipe`, if there is one. `guard` handles signals until the supervisor does."""
    begun = process_began()
    prepared = prepare(invocation.loaded.config)
    if invocation.options["print_config"]:
        print(to_yaml(prepared.config), end="")
        return 0
    launch = prepared.config.launch
    log.configure("launch", level=launch.log_level, form=launch.log_format)
    views: list[ServeView] = []

    def on_event(event: Event) -> None:
        views[0].on_event(event)
        if isinstance(event, AllReady):
            settle_memory()

    supervisor = Supervisor(prepared.config, on_event, prespawned=prespawned)
    try:
        with guard.held():  # first of all: the parts can work while the console is imported
            guard.ends.append(supervisor.close)
            supervisor.start()
        views.append(_make_view(prepared, begun, supervisor))
        guard.ends.append(views[0].console.close)
        with views[0].console.around_stderr(pipe):
            for part in supervisor.parts:
                views[0].console.progress(part.name, "start", 0, 1)
            guard.hand_over(supervisor.stop_by_signal)
            status = supervisor.run()
    finally:
        supervisor.close()
        for view in views:
            view.console.close()
    if supervisor.failed is not None:
        print_failed(supervisor.failed)
    return status


def _make_view(prepared: Prepared, begun: float, supervisor: Supervisor) -> ServeView:
    from trireme.launch.console import Console

    view = ServeView(Console(), prepared, begun)
    view.make_boot = lambda: supervisor.boot_for("front", "client")
    view.show_title()
    return view


class ServeView:
    """Shows the supervisor's events as lines, bars and the ready panel."""

    def __init__(self, console: Console, prepared: Prepared, begun: float) -> None:
        self.console = console
        self.prepared = prepared
        self.begun = begun
        self.run_dir = ""
        self.make_boot: Callable[[], Boot] | None = None  # Boot for another program that joins

    def show_title(self) -> None:
        device, model = self.prepared.device, self.prepared.model
        what = (
            f"{describe(model.arch)}, {format_bytes(model.weight_bytes)}" if model.weight_bytes else model.arch.family
        )
        self.console.title(f"trireme {__version__}  serve {model.name}  ({what})", f"{device.cores} cores {device.cpu}")

    def on_event(self, event: Event) -> None:
        """Shows one event of the supervisor."""
        match event:
            case Progress():
                self._leave_pass()
                self.console.progress(event.source, event.phase, event.done, event.total)
            case Ready():
                self.console.progress(event.source, "start", 1, 1)
            case AllReady():
                self._on_all_ready(event)
            case Died():
                again = "it stays down" if event.restart_s is None else f"it starts again in {event.restart_s:g} s"
                self.console.say(f"{event.name} died: {event.error}; {again}", style="yellow")
            case Restarted():
                self.console.say(f"{event.name} is back, in its life number {event.epoch + 1}", style="green")
            case Stopping():
                again = "once more stops at once"
                self.console.say(f"{event.reason}: finishing what runs, at most {event.deadline_s:g} s; {again}")
            case Stopped():
                self.console.close()

    def _leave_pass(self) -> None:
        """Writes the connection file once, as soon as any part runs: an early client waits for the engines."""
        if self.make_boot is not None and not self.run_dir:
            boot = self.make_boot()
            write_pass(boot)
            self.run_dir = boot.run_dir

    def _on_all_ready(self, event: AllReady) -> None:
        self._leave_pass()
        parts = breakdown(self.begun, lives_of(event.parts, event.born_at), time.monotonic(), "fronts")
        _log.info("ready. %s", log.facts(**timeline(event, self.begun, parts)))
        self.console.close()
        self.console.decisions(merge_decisions(self.prepared.decisions, event.parts))
        config = self.prepared.config
        if not is_loopback(config.serving.host) and not config.serving.api_key:
            self.console.say(
                f"anybody who reaches {config.serving.host} may use this server: --api-key", style="yellow"
            )
        if event.address is not None:
            address = url_of(*event.address)
            also = f"also   {address}/metrics   trireme chat --url {address}"
            also += f"   trireme.Client({self.run_dir!r})" if self.run_dir else ""
            for i, other in enumerate(event.addresses[1:], 1):
                mine = engines_of_front(config, i)
                also += f"\n       {url_of(*other)} engines {mine.start}..{mine.stop - 1}"
            self.console.ready(sum(parts.values()), address, curl_line(address, config), also, line_of(parts))


def timeline(event: AllReady, launched: float, parts: dict[str, float]) -> dict[str, str]:
    """A start in readings of time.monotonic, and the seconds of its parts; `bench startup` reads them."""
    port = event.address[1] if event.address is not None else 0
    seconds = {f"{PART}{name}": value for name, value in parts.items()}
    stamps = {"launched": launched, **event.ready_at, **seconds}
    return {"port": str(port), **{name.replace(" ", "_"): f"{value:.4f}" for name, value in stamps.items()}}


def url_of(host: str, port: int) -> str:
    """A URL for clients on this machine."""
    shown = "127.0.0.1" if host in _ANY_ADDRESS else host
    return "http://" + netloc(shown.replace("%", "%25"), port)


def curl_line(address: str, config: EngineConfig) -> str:
    """A curl command that gets an answer."""
    conversation = [{"role": "user", "content": "What is a trireme?"}]
    body = msgspec.json.encode({"model": config.model.served_name, "messages": conversation}).decode()
    key = " \\\n  -H 'Authorization: Bearer '\"$TRIREME_API_KEY\"" if config.serving.api_key else ""
    return f"curl {address}/v1/chat/completions -H 'Content-Type: application/json'{key} \\\n  -d {shlex.quote(body)}"


def merge_decisions(first: list[Decision], parts: dict[str, Ready]) -> list[Decision]:
    """The resolver's decisions, then those of the parts. Identical ones are reported once, and where a part follows the resolver,
    the resolver's reason is kept."""
    told = {decision.what for decision in first}
    found = (Decision(*decision) for part in parts.values() for decision in part.decisions)
    return [*first, *dict.fromkeys(d for d in found if d.what.replace(" ", "-") not in told)]


def print_failed(failed: Failed) -> None:
    """A child's own exception: its traceback when the fault is ours, its message and hint last."""
    if failed.traceback and failed.exit_code == 1:
        from trireme.launch.console import Console

        Console().say(failed.traceback.rstrip(), style="dim")
    print_error(f"{failed.source}: {failed.error}", failed.hint)
