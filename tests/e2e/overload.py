"""Three times as many requests as the engines can serve: `python -m tests.e2e.overload --seconds 30`.

Starts a server of its own with a worker that takes a fixed time per step, so that what it can serve is known. Requests come at
random moments, whatever happened to those before (an open loop). Prints how soon those that were refused knew it, and how long a
server that has nothing to do took to answer /health meanwhile: what is above that is the server's own doing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from tests.e2e.deployment import Deployment
from tests.models.tiny import make_tiny_llama
from trireme.metrics import percentile

ROWS, QUEUE, STEP_MS, TOKENS = 8, 16, 5.0, 60
FLAGS = ("--served-name", "tiny", "--worker", "fake", "--max-num-seqs", str(ROWS), "--max-waiting", str(QUEUE))
CAPACITY = ROWS / (TOKENS * STEP_MS / 1000)  # requests per second, if steps took no longer than the worker


class Answer(NamedTuple):
    status: int
    headers: dict[str, str]
    body: dict[str, object]
    took_s: float


class Load:
    """Answers in the order of their ends, and how long probes of the idle server took meanwhile."""

    def __init__(self, loaded: Deployment, idle: Deployment) -> None:
        self.port, self.idle_port = loaded.port, idle.port
        self.answers: list[Answer] = []
        self.probes: list[float] = []

    async def run(self, rate: float, seconds: float, seed: int = 1) -> None:
        dice, end, tasks = random.Random(seed), time.monotonic() + seconds, []
        probing = asyncio.create_task(self._probe(end))
        while time.monotonic() < end:
            tasks.append(asyncio.create_task(self._complete()))
            await asyncio.sleep(dice.expovariate(rate))
        await asyncio.gather(probing, *tasks)

    async def _complete(self) -> None:
        fields = {"model": "tiny", "prompt": "x", "max_tokens": TOKENS, "ignore_eos": True}
        self.answers.append(await ask(self.port, "POST", "/v1/completions", json.dumps(fields).encode()))

    async def _probe(self, end: float) -> None:
        while time.monotonic() < end:
            answer = await ask(self.idle_port, "GET", "/health")
            assert answer.status == 200
            self.probes.append(answer.took_s)
            await asyncio.sleep(0.02)

    @property
    def refused(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 503]

    @property
    def served(self) -> list[Answer]:
        return [answer for answer in self.answers if answer.status == 200]


async def ask(port: int, method: str, path: str, body: bytes = b"") -> Answer:
    """One request on a connection of its own, connecting included."""
    began = time.monotonic()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"{method} {path} HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    took_s = time.monotonic() - began
    writer.close()
    first, _, rest = answer.partition(b"\r\n\r\n")
    line, *lines = first.decode().split("\r\n")
    headers = {name.lower(): value for name, _, value in (each.partition(": ") for each in lines)}
    return Answer(int(line.split()[1]), headers, json.loads(rest) if path.startswith("/v1") else {}, took_s)


def p_ms(times: list[float], p: float) -> float:
    return percentile(times, p) * 1000


def report(load: Load, rate: float) -> str:
    refused = [answer.took_s for answer in load.refused]
    served = [answer.took_s for answer in load.served]
    return (
        f"{rate:.0f} requests per second where {CAPACITY:.0f} can be served: {len(served)} served, {len(refused)} refused\n"
        f"refused after ms  p50 {p_ms(refused, 50):.1f}  p99 {p_ms(refused, 99):.1f}  max {max(refused) * 1000:.1f}\n"
        f"served after ms   p50 {p_ms(served, 50):.1f}  p99 {p_ms(served, 99):.1f}\n"
        f"idle server ms    p50 {p_ms(load.probes, 50):.1f}  p99 {p_ms(load.probes, 99):.1f}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=float, default=3.0, help="of what can be served")
    parser.add_argument("--seconds", type=float, default=30.0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        model = make_tiny_llama(Path(directory) / "tiny", fake={"delay_ms": STEP_MS})
        with Deployment(model, *FLAGS) as loaded, Deployment(model, *FLAGS) as idle:
            load = Load(loaded, idle)
            asyncio.run(load.run(options.times * CAPACITY, options.seconds))
            print(report(load, options.times * CAPACITY))


if __name__ == "__main__":
    main()
