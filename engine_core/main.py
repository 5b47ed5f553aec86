"""The engine process: boots, starts its workers, sizes the KV memory, binds the frontend socket, runs the loop.

Started by launch/processes/supervisor.py as `spawn("engine_core.main", boot)`. On any failure frontends receive the root cause
(EngineDown), the workers end, and the supervisor receives it as Failed and starts the next life.
"""

from __future__ import annotations

import logging

import msgspec

from trireme.config import EngineConfig
from trireme.engine_core.executor.base import Executor, WorkerLost, WorkerPlace
from trireme.engine_core.executor.factory import make_executor
from trireme.engine_core.lifecycle.stepping import Independent, Lockstep, Stepping
from trireme.engine_core.lifecycle.wave import Wave
from trireme.engine_core.loop import EngineLoop
from trireme.engine_core.start import start_core
from trireme.errors import TriremeError
from trireme.log import configure, facts
from trireme.transport.process.boot import BootChannel
from trireme.transport.sockets.names import Connection, Poller, Server
from trireme.transport.wire.messages import (
    Failed,
    FromCoordinator,
    FrontToEngine,
    GiveBack,
    LoadProgress,
    Progress,
    Resync,
    WaveOrder,
    Welcome,
)

log = logging.getLogger("trireme.engine")


def main(channel: BootChannel) -> None:
    """Entry of the child process."""
    boot = channel.boot
    config = msgspec.msgpack.decode(boot.config, type=EngineConfig)
    configure(boot.name, level=config.launch.log_level, form=config.launch.log_format)
    poller = Poller()
    executor = make_executor(config, WorkerPlace(boot.index, boot), poller)
    try:
        _serve(channel, config, poller, executor)
    except WorkerLost as error:
        executor.close()
        channel.fail(Failed(boot.name, error.message, error.hint, error.traceback, error.exit_code))
    finally:
        executor.close()


def _serve(channel: BootChannel, config: EngineConfig, poller: Poller, executor: Executor) -> None:
    boot = channel.boot
    is_alone = config.parallel.tp * config.parallel.pp == 1

    def progress(message: LoadProgress) -> None:
        source = boot.name if is_alone else f"{boot.name}.worker-{message.worker}"
        channel.forward(Progress(source, message.phase, message.done, message.total))

    poller.add(channel, lambda: _leave_if_asked(channel))
    started = start_core(config, executor, progress, engine=boot.index, epoch=boot.epoch, phases=channel.phases)
    server = Server.open(boot, f"{boot.name}.front", FrontToEngine, facts=started.core.facts())
    coordinator = Connection.open(boot, "coordinator", FromCoordinator) if config.parallel.dp > 1 else None
    stepping: Stepping = Independent(started.core, boot.pause, channel.paused)
    if config.in_lockstep and coordinator is not None:
        stepping = Lockstep(started.core, Wave(boot.index, boot.epoch, executor.depth), coordinator.send)
    loop = EngineLoop(
        started.core,
        executor,
        server,
        poller,
        step_timeout=config.launch.step_timeout,
        stepping=stepping,
        on_load=coordinator.send if coordinator is not None else None,
        on_turn=channel.beat,
        tells_blocks=config.routes_by_prefix,
        has_captures=config.parallel.worker_kind == "cuda",
    )
    if coordinator is not None:
        poller.add(coordinator, lambda: _on_coordinator(coordinator, loop))
    poller.remove(channel)
    poller.add(channel, lambda: _on_orders(channel, loop))
    channel.ready(msgspec.structs.asdict(started.core.facts()), started.decisions)
    log.info("ready %s", facts(blocks=started.core.limits.num_blocks, max_len=started.core.limits.max_len))
    try:
        loop.run()
    except Exception as error:  # process main: whoever waits for this process must learn why
        reason = error.message if isinstance(error, TriremeError) else f"{type(error).__name__}: {error}"
        loop.last_words(reason)
        raise
    finally:
        server.close()
        if coordinator is not None:
            coordinator.close()


def _leave_if_asked(channel: BootChannel) -> None:
    """Exits at once on a drain while loading: there is no work to finish."""
    if channel.receive():
        raise SystemExit(0)


def _on_orders(channel: BootChannel, loop: EngineLoop) -> None:
    for order in channel.receive():
        loop.drain(order)


def _on_coordinator(coordinator: Connection, loop: EngineLoop) -> None:
    """Reports to a coordinator that has (re)connected: its state is soft and rebuilt from reports."""
    for message in coordinator.receive():
        match message:
            case Welcome():
                loop.reports.start_over()
                loop.stepping.welcome()
            case Resync():
                loop.reports.tell_all_blocks()
            case GiveBack():
                loop.reclaim(message)
            case WaveOrder():
                loop.stepping.on_order(message)
