"""A front end process: takes its place at birth, loads the tokenizer, connects to the engines, serves HTTP until told to leave.

Started by the supervisor as `serving.main` through transport/boot.py. Listens at once, so that /health and /ready answer
while the engines load. The life of the process is here; requests are elsewhere.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import time
from collections.abc import Callable
from typing import Any

import msgspec

from serving.app import make_app
from serving.client import Connect, EngineClient
from serving.front import Front
from serving.listener import Listener
from serving.siblings import Siblings
from serving.tokens import load_tokenizer
from transport.aio import AsyncConnection
from transport.boot import BootChannel
from transport.messages import Boot, EngineToFront, FromCoordinator
from trireme.arch import read_arch
from trireme.config import EngineConfig
from trireme.log import configure, facts
from trireme.packaged import find_model

log = logging.getLogger(__name__)

CLEANUP_S = 10.0


def main(channel: BootChannel) -> None:
    """Runs until a Drain has been carried out. Exceptions reach the supervisor through the channel."""
    config = msgspec.msgpack.decode(channel.boot.config, type=EngineConfig)
    configure(channel.boot.name, level=config.launch.log_level, form=config.launch.log_format)
    start = time.monotonic()
    channel.progress("tokenizer", 0, 1)
    files = find_model(config.model.model)
    tokenizer = load_tokenizer(files, tokenizer=config.model.tokenizer)
    channel.progress("tokenizer", 1, 1)
    eos = read_arch(files).eos_token_ids
    phases = {"tokenizer": time.monotonic() - start}

    async def run() -> None:
        client = client_over_sockets(channel.boot, config)
        siblings = Siblings(
            channel.boot.run_dir, channel.boot.index, config.serving.api_servers, lambda: front.own_snapshot()
        )
        front = Front(
            config,
            client,
            tokenizer,
            model_name=config.model.served_name or files.name,
            eos_token_ids=eos,
            snapshots=siblings.snapshots,
        )
        await _serve(channel, front, siblings, phases)

    with asyncio.Runner(loop_factory=_loop_factory()) as runner:
        runner.run(run())


def client_over_sockets(boot: Boot, config: EngineConfig) -> EngineClient:
    """One link per engine, one to the coordinator when there are several engines. Links open when the client starts."""

    def over(name: str, accepts: Any) -> Connect:
        return lambda on_message: AsyncConnection.open(boot, name, accepts, on_message)

    engines = [over(f"engine-{index}.front", EngineToFront) for index in range(config.parallel.dp)]
    return EngineClient(engines, over("coordinator", FromCoordinator) if config.parallel.dp > 1 else None)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    """uvloop where it is installed."""
    with contextlib.suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop
    return None


async def _serve(channel: BootChannel, front: Front, siblings: Siblings, phases: dict[str, float]) -> None:
    boot = channel.boot
    loop = asyncio.get_running_loop()
    leave = asyncio.Event()
    deadline_s = front.config.serving.drain_timeout

    def on_order() -> None:
        nonlocal deadline_s
        channel.acknowledge()
        for drain in channel.receive():
            deadline_s = drain.deadline_s
            leave.set()

    loop.add_reader(channel.fileno(), on_order)
    beats = loop.create_task(_beat(channel))
    front.client.start()
    front.ticker.start()
    await siblings.start()
    listener = Listener(make_app(front), socket.socket(fileno=boot.listen_fd))
    await listener.start()
    channel.ready(phases=phases, decisions=[("chat template", front.renderer.template.name, "see --chat-template")])
    log.info("listening. %s", facts(fd=boot.listen_fd, model=front.model_name, template=front.renderer.template.name))
    await leave.wait()
    await drain(front, listener, notice_s=front.config.serving.drain_notice, deadline_s=deadline_s)
    siblings.close()
    front.close()
    beats.cancel()
    loop.remove_reader(channel.fileno())


async def drain(front: Front, listener: Listener, *, notice_s: float, deadline_s: float) -> None:
    """Leaves in order: not ready at once, still accepting for the notice period, then refusing; streams may run until the
    deadline, and those that do not make it end with an explicit error."""
    end = time.monotonic() + deadline_s
    front.is_draining = True
    log.info("draining. %s", facts(open=front.telemetry.open, notice_s=notice_s, deadline_s=deadline_s))
    await _until(lambda: False, min(notice_s, deadline_s))
    front.is_refusing = True
    await _until(lambda: front.num_inside == 0, end - time.monotonic())
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
