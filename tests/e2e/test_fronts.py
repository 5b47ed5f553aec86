"""Several HTTP processes behind one port are one server: limits, metrics and the prefix cache, also when one of them is stopped or
killed."""

from __future__ import annotations

import json
import os
import signal
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.e2e.deployment import Deployment, wait_for
from tests.models.tiny import make_tiny_llama

LIMIT = 10
KEYS = ("ann", "bob", "probe")
QUOTAS = f"""
clients:
  - {{key: ann, requests_per_minute: {LIMIT}}}
  - {{key: bob, requests_per_minute: {LIMIT}}}
  - {{key: probe}}
"""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    directory = tmp_path_factory.mktemp("fronts")
    (directory / "quotas.yaml").write_text(QUOTAS)
    model = make_tiny_llama(directory / "tiny")
    flags = (
        "--served-name",
        "tiny",
        "--worker",
        "fake",
        "--api-servers",
        "2",
        "--quotas",
        str(directory / "quotas.yaml"),
    )
    deployment = Deployment(model, *flags)
    deployment.launch()
    try:
        wait_for(lambda: "ready in" in deployment.output(), 90, "ready")
        yield deployment
    finally:
        deployment.stop(kill=True)


def ask(server: Deployment, key: str, path: str = "/v1/completions", **fields: object) -> tuple[int, str]:
    """On a connection of its own: whichever front end takes it."""
    body = None if path == "/metrics" else json.dumps({"prompt": "hello there", "max_tokens": 2, **fields}).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}", "Connection": "close"}
    try:
        with urllib.request.urlopen(urllib.request.Request(server.url + path, body, headers), timeout=30) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def statuses(server: Deployment, key: str, count: int) -> list[int]:
    with ThreadPoolExecutor(8) as pool:
        return sorted(status for status, _ in pool.map(lambda _: ask(server, key), range(count)))


def fronts(server: Deployment) -> dict[str, psutil.Process]:
    found = {}
    for process in psutil.Process(server.process.pid).children(recursive=True):
        with suppress(OSError):  # it has ended meanwhile
            name = Path(f"/proc/{process.pid}/comm").read_text().strip()
            if name.startswith("front-"):
                found[name] = process
    return found


def counters(server: Deployment) -> dict[str, float]:
    """All that may only rise."""
    status, text = ask(server, "probe", "/metrics")
    assert status == 200, text
    lines = (line.rsplit(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines if "_total" in name or "_bucket" in name or "_count" in name}


def assert_none_fell(before: dict[str, float], after: dict[str, float]) -> None:
    assert before.keys() <= after.keys()
    assert not {name: (value, after[name]) for name, value in before.items() if after[name] < value}


def test_a_limit_is_one_limit_however_many_processes_there_are(server: Deployment) -> None:
    assert statuses(server, "ann", 25) == [200] * LIMIT + [429] * 15


def test_counters_do_not_fall_while_one_is_stopped_or_after_it_died(server: Deployment) -> None:
    for _ in range(12):
        assert ask(server, "probe")[0] == 200
    before = counters(server)
    assert before['trireme_requests_received_total{route="completions"}'] == LIMIT + 12
    parts = fronts(server)
    assert sorted(parts) == ["front-0", "front-1"]
    os.kill(parts["front-1"].pid, signal.SIGSTOP)
    try:
        busy = counters_of_the_other(server)
    finally:
        os.kill(parts["front-1"].pid, signal.SIGCONT)
    assert_none_fell(before, busy)
    for name, process in parts.items():
        process.kill()
        wait_for(lambda name=name: name in fronts(server) and "is back" in server.output(), 30, f"{name} again")  # type: ignore[misc]
        wait_for(lambda: ask(server, "probe")[0] == 200, 30, "an answer")
        after = counters(server)
        assert_none_fell(before, after)
        before = after
    outcomes = [value for name, value in before.items() if name.startswith("trireme_requests_total")]
    assert sum(outcomes) == before['trireme_requests_received_total{route="completions"}']
    assert statuses(server, "ann", 6) == [429] * 6, "nor does a death forgive what was used"


def counters_of_the_other(server: Deployment) -> dict[str, float]:
    """Connections that the stopped one was given get no answer: some more, until the other one has one."""
    with ThreadPoolExecutor(4) as pool:
        answers = [pool.submit(counters, server) for _ in range(4)]
        return next(iter(wait_for(lambda: [each.result() for each in answers if each.done()], 20, "an answer")))


def test_what_one_process_learned_of_a_key_the_other_does_not_tell(server: Deployment) -> None:
    text = "a long prompt that fills more than one block of the prefix cache " * 2

    def cached(key: str) -> set[int]:
        answers = [json.loads(ask(server, key, prompt=text)[1]) for _ in range(5)]
        return {answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers}

    assert 0 in cached("probe")
    own = cached("probe")
    assert 0 not in own, "whichever process asks for it"
    assert cached("bob") == {0, *own}, "the first of them had to compute it"
