"""`trireme bench serve` and `bench sweep` against running servers: one, two that count as one, objectives, a search for a rate."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import ROOT, Deployment
from tests.models.tiny import make_stub, make_tiny_llama


def bench(*words: str) -> subprocess.CompletedProcess[str]:
    """`trireme bench WORDS --json`."""
    command = [sys.executable, "-m", "trireme.launch.cli", "bench", *words, "--json"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


def rows_of(done: subprocess.CompletedProcess[str]) -> list[dict[str, Any]]:
    assert done.returncode == 0, done.stderr
    return list(json.loads(done.stdout)["rows"])


def test_a_peer_of_several_addresses_gets_its_clients_in_turn(tmp_path: Path) -> None:
    tiny = make_tiny_llama(tmp_path / "tiny")
    with Deployment(tiny, "--threads", "1") as one, Deployment(tiny, "--threads", "1") as other:
        before = [server.metric("trireme_requests_total") for server in (one, other)]
        urls = [f"http://127.0.0.1:{server.port}" for server in (one, other)]
        words = ["serve", "--url", urls[0], "--peer", ",".join(urls), "--concurrency", "4"]
        words += ["--num-requests", "8", "--repeats", "2", "--input-len", "8", "--output-len", "4"]
        rows = {row["name"]: row for row in rows_of(bench(*words))}
        assert {name for name in rows if "/" not in name} == {"trireme c=4", "peer c=4"}
        assert [name for name in rows if "/" in name] == ["trireme / peer c=4"]
        gained = [
            server.metric("trireme_requests_total") - was for server, was in zip((one, other), before, strict=True)
        ]
        assert sum(gained) == 2 * (2 * 8) + 3  # with those that warmed up
        assert 4 <= gained[1] - 1 <= 12  # clients 1 and 3 of the four


STEP_S, OUTPUT_LEN = 0.005, 6


@pytest.fixture(scope="module")
def one_at_a_time(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """A server that runs one request after the other, each for at least 30 ms: no more than 33 a second."""
    model = make_stub(tmp_path_factory.mktemp("stub") / "model", scripts=[["a"] * 64], delay_ms=STEP_S * 1e3)
    with Deployment(model, "--max-num-seqs", "1") as server:
        yield server


def lengths(server: Deployment) -> list[str]:
    return ["--url", server.url, "--input-len", "8", "--output-len", str(OUTPUT_LEN)]


def test_goodput_of_closed_loops(one_at_a_time: Deployment) -> None:
    words = ["serve", *lengths(one_at_a_time), "--concurrency", "1,2", "--num-requests", "6"]
    rows = rows_of(bench(*words, "--slo", "ttft=60s,itl=60s"))
    assert [row["name"] for row in rows] == ["c=1", "c=2"]
    for row in rows:
        assert row["attainment"] == 1.0
        assert row["goodput_req_s"] == pytest.approx(6 / row["wall_s"])
        assert row["itl_p50_ms"] <= row["itl_p95_ms"] <= row["itl_p99_ms"] <= row["itl_max_ms"]
        assert row["ttft_p50_ms"] <= row["ttft_p95_ms"] <= row["ttft_p99_ms"]


def test_a_sweep_finds_the_highest_rate(one_at_a_time: Deployment) -> None:
    """At 33 requests a second and more the queue only grows; of a burst, the server takes five requests at most."""
    words = ["sweep", *lengths(one_at_a_time), "--num-requests", "12", "--slo", "ttft=300ms", "--attainment", "0.8"]
    done = bench(*words)
    rows = rows_of(done)
    rates = [row["rate"] for row in rows]
    kept = [row["rate"] for row in rows if row["attainment"] >= 0.8]
    missed = rates[len(kept) :]
    assert rates == sorted(set(rates))
    assert kept == rates[: len(kept)]
    assert json.loads(done.stdout)["highest_rate"] == {"trireme": kept[-1]}
    assert kept[-1] < missed[0] <= 1.05 * kept[-1]
    line = f"highest rate that keeps ttft 300 ms for 80 % of requests: {kept[-1]:.3g} requests/s"
    assert done.stderr.splitlines()[-1] == line
    for rate in rates:
        assert re.search(rf"^  r={rate:g}/s +(kept|missed) .* % of 12 requests good", done.stderr, re.MULTILINE)


def test_a_sweep_of_a_goal_that_nothing_keeps_ends_at_once(one_at_a_time: Deployment) -> None:
    done = bench("sweep", *lengths(one_at_a_time), "--slo", f"e2e={STEP_S * OUTPUT_LEN * 900:g}ms")
    assert done.returncode == 1
    assert "no rate keeps e2e 27 ms for 90 % of requests: not even one request at a time does" in done.stderr
    (row,) = json.loads(done.stdout)["rows"]
    assert (row["name"], row["attainment"], row["goodput_req_s"]) == ("c=1", 0.0, 0.0)
    assert json.loads(done.stdout)["highest_rate"] == {"trireme": 0.0}
