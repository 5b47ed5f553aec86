"""A front end in the test's own loop, on a real TCP port, over scripted engines: what an HTTP client sees."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai

from tests.models.tiny import make_stub
from tests.serving.engines import FakeEngine, client_of
from trireme.config import EngineConfig, ModelConfig, SchedulerConfig, ServingConfig
from trireme.launch.api.deployment import InProcess
from trireme.launch.processes.listeners import listen
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.resolve import prepare
from trireme.serving.app import make_app
from trireme.serving.engines.client import EngineClient
from trireme.serving.front import Front
from trireme.serving.http.listener import WANTED_CONNECTIONS, Listener
from trireme.serving.shared_state import SharedState
from trireme.serving.text.tokens import load_tokenizer
from trireme.settings import load


class Served:
    """One running front end. `url` is its address; `openai` the official client for it (slow to make)."""

    def __init__(self, front: Front, engines: Sequence[FakeEngine], listener: Listener, port: int) -> None:
        self.front, self.engines, self.listener, self.port = front, engines, listener, port
        self.engine = engines[0] if engines else FakeEngine()
        self.url = f"http://127.0.0.1:{port}"

    @functools.cached_property
    def openai(self) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0)

    async def request(
        self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None, raw: bytes | None = None
    ) -> tuple[int, dict[str, str], bytes]:
        """One request by hand: (status, headers, body). The connection is closed after it."""
        data = raw if raw is not None else b"" if body is None else json.dumps(body).encode()
        fixed = {"host": "127.0.0.1", "connection": "close", "content-length": str(len(data))}
        if body is not None or raw is not None:
            fixed["content-type"] = "application/json"
        fixed |= headers or {}
        head = f"{method} {path} HTTP/1.1\r\n" + "".join(f"{k}: {v}\r\n" for k, v in fixed.items()) + "\r\n"
        return await self.send(head.encode() + data)

    async def send(self, data: bytes) -> tuple[int, dict[str, str], bytes]:
        """Raw bytes out, one whole answer in."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        answer = await asyncio.wait_for(reader.read(), 20)
        writer.close()
        head, _, rest = answer.partition(b"\r\n\r\n")
        lines = head.decode().split("\r\n")
        found = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines[1:])}
        if found.get("transfer-encoding") == "chunked":
            rest = _dechunk(rest)
        return int(lines[0].split()[1]), found, rest

    async def post(self, path: str, body: Any, **headers: str) -> tuple[int, Any]:
        status, _, answer = await self.request("POST", path, body, headers)
        return status, json.loads(answer)

    async def events(self, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
        """Parsed events of a stream, [DONE] as a string, comments left out."""
        status, _, answer = await self.request("POST", path, {**body, "stream": True}, headers)
        assert status == 200, answer
        found: list[Any] = []
        for event in answer.decode().split("\n\n"):
            if event.startswith("data: "):
                found.append(event[6:] if event == "data: [DONE]" else json.loads(event[6:]))
        return found

    async def numbers(self) -> dict[str, float]:
        """All samples of /metrics."""
        _, _, text = await self.request("GET", "/metrics")
        samples = [line.rsplit(" ", 1) for line in text.decode().splitlines() if line and not line.startswith("#")]
        return {name: float(value) for name, value in samples}

    async def quiet(self) -> None:
        """Waits until no request is inside."""
        async with asyncio.timeout(5):
            while self.front.num_inside or self.front.client.num_choices:
                await asyncio.sleep(0.005)

    async def freed(self) -> None:
        """Waits until the real engine holds no row and no block of anybody."""
        async with asyncio.timeout(2):
            while True:
                stats = await self.front.client.call(0, "stats")
                if not (stats["num_running"] or stats["num_waiting"] or stats["blocks_owned"]):
                    return
                await asyncio.sleep(0.01)


def _dechunk(data: bytes) -> bytes:
    out = b""
    while data:
        size, _, data = data.partition(b"\r\n")
        length = int(size or b"0", 16)
        out, data = out + data[:length], data[length + 2 :]
    return out


@contextlib.asynccontextmanager
async def serve(
    directory: Path,
    *engines: FakeEngine,
    extra: Sequence[str] = (),
    max_connections: int = WANTED_CONNECTIONS,
    shared: SharedState | None = None,
    itl_target: str = "off",
    **settings: Any,
) -> AsyncIterator[Served]:
    """A front end over scripted engines, for a T-byte model with these extra tokens; `settings` go to ServingConfig. `shared` is
    what it has in common with others."""
    model = make_stub(directory / "model", extra=extra)
    config = EngineConfig(
        model=ModelConfig(model=str(model), served_name="stub"),
        scheduler=SchedulerConfig(itl_target=itl_target),
        serving=ServingConfig(**settings),
    )
    serving = config.serving
    client = client_of(*engines, migration_limit=serving.migration_limit, engine_wait_s=serving.engine_wait)
    try:
        async with _front_end(config, client, engines, max_connections, shared) as served:
            if all(engine.is_up for engine in engines):
                await client.wait_up(2)
            yield served
    finally:
        for engine in engines:
            engine.stop()


@contextlib.asynccontextmanager
async def serve_model(model: Path, **settings: Any) -> AsyncIterator[Served]:
    """A front end over a real engine with a real worker, in threads of this process. `settings` as on the command line."""
    prepared = prepare(load({"model": str(model), "served_name": "stub", **settings}).config)
    engine = InProcess(prepared.config, lambda _: None)
    await asyncio.to_thread(engine.start)
    client = engine.client()
    try:
        client.start()
        async with _front_end(prepared.config, client) as served:
            await client.wait_up(5)
            yield served
    finally:
        await asyncio.to_thread(engine.close)


@contextlib.asynccontextmanager
async def _front_end(
    config: EngineConfig,
    client: EngineClient,
    engines: Sequence[FakeEngine] = (),
    max_connections: int = WANTED_CONNECTIONS,
    shared: SharedState | None = None,
) -> AsyncIterator[Served]:
    files = find_model(config.model.model)
    arch = read_arch(files)
    front = Front(
        config, client, load_tokenizer(files), model_name="stub", eos_token_ids=arch.eos_token_ids, shared=shared
    )
    front.ticker.start()
    listening = listen(config.serving.host, 0)
    listener = Listener(make_app(front), listening, max_connections=max_connections)
    port = listening.getsockname()[1]
    await listener.start()
    served = Served(front, engines, listener, port)
    try:
        yield served
    finally:
        if "openai" in vars(served):
            await served.openai.close()
        await listener.stop(0.2)
        front.close()
