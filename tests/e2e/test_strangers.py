"""A running node and those who should not be there: frames that are none at every socket, and ports that are closed."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e import frames
from tests.e2e.deployment import Deployment
from tests.models.tiny import make_tiny_llama


@pytest.mark.timeout(180)
def test_mutated_frames_end_no_process() -> None:
    print(frames.run(4000, seed=7))


@pytest.mark.timeout(180)
def test_strangers_at_tcp_ports_end_no_process() -> None:
    print(frames.run_tcp(200, seed=7))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_hundred_thousand_mutated_frames_end_no_process() -> None:
    print(frames.run(100_000, seed=1))


@pytest.mark.timeout(120)
@pytest.mark.parametrize("transport", ["ipc", "tcp"])
def test_only_the_api_port_answers_off_loopback(tmp_path: Path, transport: str) -> None:
    """Every listening socket of every process, on a node that is open to the network."""
    model = make_tiny_llama(tmp_path / "tiny")
    flags = ("--worker", "fake", "--dp", "2", "--host", "0.0.0.0", "--api-key", "secret", "--transport", transport)
    with Deployment(model, *flags) as deployment:
        places = {each.laddr for each in frames.listening(deployment)}
        off_loopback = {(place.ip, place.port) for place in places if place.ip not in ("127.0.0.1", "::1")}
        assert off_loopback == {("0.0.0.0", deployment.port)}
        inside = {place.port for place in places} - {deployment.port}
        assert bool(inside) == (transport == "tcp")
