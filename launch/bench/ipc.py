"""`trireme bench ipc`: the IPC overhead between a frontend and a model: client, engine core and a fake worker, each in its own
process, over their real sockets.

The worker answers every step at once, so a step is all overhead. Core time is the CPU time of the engine's loop.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from trireme.config import CacheConfig, EngineConfig, LaunchConfig, ModelConfig, ParallelConfig, SchedulerConfig
from trireme.errors import ConfigError, EngineError
from trireme.launch.bench.samples import RunSummary, publish
from trireme.launch.options import Invocation
from trireme.metrics import percentile
from trireme.params import RowParams
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.stream import Stream
from trireme.transport.process.boot import reap, spawn
from trireme.transport.process.rundir import RunDir
from trireme.transport.sockets.aio import AsyncConnection
from trireme.transport.sockets.poller import Poller
from trireme.transport.wire.codec import encode
from trireme.transport.wire.messages import Boot, EngineToFront, Failed, StepOutputs

PROMPT_LEN, BLOCK_SIZE = 32, 16
START_S = 60.0
FAKE = {"vocab_size": 1000, "fake": {"skip_kv": True, "free_bytes": 1 << 40}}


class Tap:
    """Taps the link to the client: records the times of step outputs and their token counts, and keeps a large one, preferably
    from a step in which no request began or ended."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.num_tokens: list[int] = []
        self.sample: StepOutputs | None = None

    def over(self, on_message: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wraps `on_message` to record each message before passing it on."""

        def take(message: Any) -> None:
            if isinstance(message, StepOutputs) and message.tokens:
                self.times.append(time.perf_counter())
                self.num_tokens.append(len(message.tokens) // 4)
                self.sample = max(self.sample or message, message, key=_worth_as_sample)
            on_message(message)

        return take


def run(invocation: Invocation) -> int:
    """Prints one row of figures for each number of running requests."""
    try:
        sizes = [int(word) for word in invocation.options["running"]]
    except ValueError:
        raise ConfigError("--running takes whole numbers", hint="--running 1,64,256") from None
    if not all(1 <= size <= 8192 for size in sizes):
        raise ConfigError(f"--running is {sizes}; each must be 1..8192", hint="--running 1,64,256")
    num_tokens = invocation.options["output_len"]
    rows = [RunSummary(f"{size} running", _measure_size(size, num_tokens)) for size in sizes]
    publish(invocation, "none", rows, None)
    return 0


def make_config(model: str, num_rows: int, num_tokens: int) -> EngineConfig:
    """An engine for exactly `num_rows` requests, with its worker in a process of its own."""
    max_len = PROMPT_LEN + num_tokens
    return EngineConfig(
        model=ModelConfig(model=model, max_len=max_len),
        cache=CacheConfig(block_size=BLOCK_SIZE, num_blocks=num_rows * (max_len // BLOCK_SIZE + 2)),
        parallel=ParallelConfig(executor="procs", worker="fake"),
        scheduler=SchedulerConfig(max_num_seqs=num_rows, max_num_tokens=max(2048, num_rows * PROMPT_LEN)),
        launch=LaunchConfig(log_level="warning"),
    )


def _measure_size(num_rows: int, num_tokens: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="trireme-ipc-") as model:
        (Path(model) / "config.json").write_text(json.dumps(FAKE))
        with _engine(make_config(model, num_rows, num_tokens)) as boot:
            return asyncio.run(_measure(boot, num_rows, num_tokens))


@contextmanager
def _engine(config: EngineConfig) -> Iterator[Boot]:
    """An engine process that is ready; yields the Boot with which a frontend joins it."""
    run_dir, poller = RunDir(), Poller()
    failures: list[Failed] = []
    boot = Boot("engine", "engine-0", 0, msgspec.msgpack.encode(config), b"ipc", run_dir.path)
    child = spawn("trireme.engine_core.main", boot)
    try:
        poller.add(child, lambda: failures.extend(m for m in child.receive() if isinstance(m, Failed)))
        until = time.monotonic() + START_S
        while not child.is_ready:
            if failures or child.is_dead or time.monotonic() > until:
                why = failures[0].error if failures else f"it is not ready within {START_S:.0f} s"
                raise EngineError(f"the engine did not start: {why}")
            poller.wait(0.05)
        yield msgspec.structs.replace(boot, role="front", name="front-0")
    finally:
        poller.remove(child)
        reap([child], 5.0)
        run_dir.remove()


async def _measure(boot: Boot, num_rows: int, num_tokens: int) -> dict[str, float]:
    tap = Tap()
    client = EngineClient(
        [lambda on_message: AsyncConnection.open(boot, "engine-0.front", EngineToFront, tap.over(on_message))]
    )
    client.start()
    try:
        await client.wait_up(10.0)
        before = await client.call(0, "stats")
        began_s, cpu_s = time.perf_counter(), time.process_time()
        streams = [await client.submit([_replay(row, num_tokens)]) for row in range(num_rows)]
        await asyncio.gather(*(_read(stream) for stream in streams))
        wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - cpu_s
        after = await client.call(0, "stats", timeout_s=30.0)
    finally:
        client.close()
    return _figures(tap, before, after, wall_s, cpu_s)


def _replay(row: int, num_tokens: int) -> Replay:
    """A request with a unique prompt, of a length that spreads block boundaries over the steps."""
    prompt = np.random.default_rng(row).integers(0, 1000, PROMPT_LEN - row % BLOCK_SIZE, dtype=np.int32)
    return Replay(prompt, RowParams(max_tokens=num_tokens, temperature=0.0, eos_token_ids=(2,)))


async def _read(stream: Stream) -> None:
    while not stream.is_done:
        await stream.next()
    stream.close()


def _worth_as_sample(message: StepOutputs) -> tuple[bool, int]:
    return not message.firsts and not message.ends, len(message.tokens)


def _figures(tap: Tap, before: dict[str, Any], after: dict[str, Any], wall_s: float, cpu_s: float) -> dict[str, float]:
    gaps_ms = [(b - a) * 1e3 for a, b in zip(tap.times, tap.times[1:], strict=False)]
    steps, num_tokens = after["steps"] - before["steps"], sum(tap.num_tokens)
    size = sum(len(frame) for frame in encode(tap.sample)) if tap.sample else 0
    return {
        "steps": float(steps),
        "messages_s": len(tap.times) / wall_s,
        "tokens_s": num_tokens / wall_s,
        "step_p50_ms": percentile(gaps_ms, 50),
        "step_p99_ms": percentile(gaps_ms, 99),
        "bytes_per_token": size / (len(tap.sample.tokens) // 4) if tap.sample else 0.0,
        "core_step_ms": percentile([s * 1e3 for s in after["core_step_s"]], 50),
        "core_mean_ms": (after["core_s"] - before["core_s"]) / max(1, steps) * 1e3,
        "front_tokens_per_cpu_s": num_tokens / cpu_s,
    }
