"""`trireme bench serve` against running servers: the same load on one, and on two that count as one."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.e2e.deployment import ROOT, Deployment
from tests.models.tiny import make_tiny_llama


def test_a_peer_of_several_addresses_gets_its_clients_in_turn(tmp_path: Path) -> None:
    tiny = make_tiny_llama(tmp_path / "tiny")
    with Deployment(tiny, "--threads", "1") as one, Deployment(tiny, "--threads", "1") as other:
        before = [server.metric("trireme_requests_total") for server in (one, other)]
        urls = [f"http://127.0.0.1:{server.port}" for server in (one, other)]
        words = ["bench", "serve", "--url", urls[0], "--peer", ",".join(urls), "--concurrency", "4"]
        words += ["--num-requests", "8", "--repeats", "2", "--input-len", "8", "--output-len", "4", "--json"]
        done = subprocess.run(
            [sys.executable, "-m", "trireme.launch.cli", *words], cwd=ROOT, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        rows = {row["name"]: row for row in json.loads(done.stdout)["rows"]}
        assert {name for name in rows if "/" not in name} == {"trireme c=4", "peer c=4"}
        assert [name for name in rows if "/" in name] == ["trireme / peer c=4"]
        gained = [
            server.metric("trireme_requests_total") - was for server, was in zip((one, other), before, strict=True)
        ]
        assert sum(gained) == 2 * (2 * 8) + 3  # with those that warmed up
        assert 4 <= gained[1] - 1 <= 12  # clients 1 and 3 of the four
