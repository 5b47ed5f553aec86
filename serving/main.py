"""A front end process: takes its place at birth, loads the tokenizer, connects to the engines, serves HTTP until told to leave.

Started by the supervisor as `serving.main` through transport/process/boot.py. Listens at once, so that /health and /ready answer
while the engines load. The life of the process is here; requests are elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from trireme.config import EngineConfig
from trireme.log import configure, facts
from trireme.model.files import files_of
from trireme.model.reader import read_arch
from trireme.serving.app import make_app
from trireme.serving.engines.connect import client_over_sockets
from trireme.serving.front import Front
from trireme.serving.http.connections import ConnectionCounts
from trireme.serving.http.listener import Listener, allow_connections
from trireme.serving.metrics.aggregation import Aggregation
from trireme.serving.shared_state import open_shared_state
from trireme.serving.text.tokens import load_tokenizer
from trireme.transport.process.boot import BootChannel
from trireme.transport.wire.messages import Drain

log = logging.getLogger(__name__)

CLEANUP_S = 10.0
RELINK_S, RELINK_WAIT_S = (
    1.0,
    5.0,
)  # a restarted frontend links to its engines before it takes connections from the others


def main(channel: BootChannel) -> None:
    """Runs until a Drain has been carried out. Exceptions reach the supervisor through the channel."""
    config = msgspec.msgpack.decode(channel.boot.config, type=EngineConfig)
    configure(channel.boot.name, level=config.launch.log_level, form=config.launch.log_format)
    channel.progress("tokenizer", 0, 1)
    files = files_of(config.model)
    tokenizer = load_tokenizer(files, tokenizer=config.model.tokenizer)
    channel.progress("tokenizer", 1, 1)
    eos = read_arch(files).eos_token_ids
    channel.phases.end("tokenizer")

    async def run() -> None:
        client = client_over_sockets(channel.boot, config)
        is_alone = config.coordinator.load_balancing != "internal"  # on a port of its own: it tells its own numbers
        run_dir, index, num_fronts = channel.boot.run_dir, channel.boot.index, config.serving.api_servers
        aggregation = Aggregation(run_dir, index, num_fronts, lambda: front.own_snapshot(), is_alone=is_alone)
        front = Front(
            config,
            client,
            tokenizer,
            model_name=config.model.served_name or files.name,
            eos_token_ids=eos,
            snapshots=aggregation.snapshots,
            shared=open_shared_state(run_dir, index, num_fronts, has_own_engines=is_alone),
            has_been_up=channel.boot.epoch > 0,  # parts are started again only when all have been ready once
        )
        counted = (0, 1) if is_alone else (index, num_fronts)  # a port of its own has connections of its own
        await _serve(channel, front, aggregation, _connection_counts(run_dir, *counted))

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


def _connection_counts(run_dir: str, number: int, total: int) -> ConnectionCounts | None:
    """Of the front ends that share a listening socket."""
    if total == 1:
        return None
    return ConnectionCounts(Path(run_dir) / "front.connections", number, total, clock=time.monotonic)


async def _serve(channel: BootChannel, front: Front, aggregation: Aggregation, counts: ConnectionCounts | None) -> None:
    boot = channel.boot
    loop = asyncio.get_running_loop()
    leaving: asyncio.Future[Drain] = loop.create_future()
    late = asyncio.Event()

    def on_order() -> None:
        channel.acknowledge()
        for report in channel.news():
            front.progress[report.source] = {"phase": report.phase, "done": report.done, "total": report.total}
        for order in channel.receive():
            if leaving.done():
                late.set()  # told twice: enough
            else:
                leaving.set_result(order)

    loop.add_reader(channel.fileno(), on_order)
    beats = loop.create_task(_beat(channel))
    front.client.start()
    front.ticker.start()
    await aggregation.start()
    if boot.epoch > 0:
        await _relinked(front)
    listener = Listener(
        make_app(front), socket.socket(fileno=boot.listen_fd), max_connections=allow_connections(), counts=counts
    )
    await listener.start()
    if boot.epoch == 0:
        await _linked_or(front, leaving)
    channel.ready(decisions=[("chat template", front.renderer.template.name, "see --chat-template")])
    log.info("listening. %s", facts(fd=boot.listen_fd, model=front.model.name, template=front.renderer.template.name))
    order = await leaving
    await drain(front, listener, notice_s=order.notice_s, deadline_s=order.deadline_s, hurry=late)
    aggregation.close()
    front.close()
    beats.cancel()
    loop.remove_reader(channel.fileno())


async def _relinked(front: Front) -> None:
    """Returns when every engine is linked; those that are not within RELINK_S are down, and the others need not wait for them."""
    for wait_s in (RELINK_S, RELINK_WAIT_S - RELINK_S):
        with contextlib.suppress(TimeoutError):
            return await front.client.wait_up(wait_s)
        if any(state.is_up for state in front.client.states()):
            return


async def _linked_or(front: Front, leaving: asyncio.Future[Drain]) -> None:
    """Returns when every engine is linked, so that "ready" holds for whichever front end a client meets, or when told to leave."""
    linked = asyncio.ensure_future(front.client.wait_up())
    either: list[asyncio.Future[Any]] = [linked, leaving]
    await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
    linked.cancel()


async def drain(
    front: Front, listener: Listener, *, notice_s: float, deadline_s: float, hurry: asyncio.Event | None = None
) -> None:
    """Leaves in order: not ready at once, still accepting for `notice_s`, then refusing; streams may run for `deadline_s`
    more, and those that do not make it end with an explicit error. `hurry` ends the waiting."""
    hurry = hurry or asyncio.Event()
    front.is_draining = True
    log.info("draining. %s", facts(open=front.telemetry.open, notice_s=notice_s, deadline_s=deadline_s))
    await _until(hurry.is_set, notice_s)
    front.refuse()
    await _until(lambda: front.num_inside == 0 or hurry.is_set(), deadline_s)
    if front.num_inside:
        log.warning("drain deadline reached, ending what is left. %s", facts(open=front.telemetry.open))
        front.client.end_all("this server is shutting down")
        await _until(lambda: front.num_inside == 0, 1.0)
    await listener.stop(CLEANUP_S)
    log.info("drained. %s", facts(open=front.telemetry.open))


async def _until(is_true: Callable[[], bool], timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while not is_true() and time.monotonic() < end:
        await asyncio.sleep(0.02)


async def _beat(channel: BootChannel) -> None:
    """Tells the supervisor that the loop turns."""
    turns = 0
    while True:
        channel.beat(turns)
        turns += 1
        await asyncio.sleep(0.5)
