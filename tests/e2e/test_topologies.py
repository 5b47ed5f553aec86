"""The same requests give the same tokens on every topology, chunking and cache setting, through HTTP and real processes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.deployment import Deployment
from tests.models.tiny import make_tiny_llama

TOPOLOGIES = {
    "plain-loop": ["--no-async-steps"],
    "multi-process": ["--executor", "procs"],
    "dp2": ["--dp", "2"],
    "tp2": ["--tp", "2"],
    "pp2": ["--pp", "2"],
    "tp2-pp2": ["--tp", "2", "--pp", "2"],
    "dp2-prefix": ["--dp", "2", "--balance", "prefix"],
    "two-front-ends": ["--api-servers", "2"],
    "dp2-two-front-ends-tcp": ["--dp", "2", "--api-servers", "2", "--transport", "tcp"],
    "chunk-16": ["--chunk", "16"],
    "chunk-64": ["--chunk", "64"],
    "no-prefix-cache": ["--no-prefix-cache"],
    "preemption": ["--num-blocks", "26", "--max-len", "256"],
}


def requests() -> list[dict[str, Any]]:
    """Greedy and seeded, short and long, with penalties, shared prefixes and n > 1."""
    shared = "The quick brown fox jumps over the lazy dog. " * 3
    bodies: list[dict[str, Any]] = []
    for i in range(6):
        bodies.append({"prompt": shared + f"tail {i}", "temperature": 0, "max_tokens": 24})
        bodies.append({"prompt": f"{i} " * (3 + 9 * i), "temperature": 0.9, "seed": i, "max_tokens": 20})
    bodies.append({"prompt": "abc", "temperature": 1.0, "seed": 7, "n": 2, "max_tokens": 16})
    bodies.append({"prompt": "penalty", "temperature": 0, "repetition_penalty": 1.3, "max_tokens": 16})
    bodies.append(
        {"prompt": "top", "temperature": 1.2, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "seed": 3, "max_tokens": 16}
    )
    return [{"model": "tiny", "ignore_eos": True, "logprobs": 0, **body} for body in bodies]


def answers(deployment: Deployment) -> list[Any]:
    """Tokens of every choice of every request, all in flight at once. Twice, so that the prefix cache is warm."""

    def ask(body: dict[str, Any]) -> Any:
        choices = deployment.post("/v1/completions", body)["choices"]
        return [
            (c["index"], c["logprobs"]["tokens"], c["finish_reason"]) for c in sorted(choices, key=lambda c: c["index"])
        ]

    results = []
    for _ in range(2):
        with ThreadPoolExecutor(16) as pool:
            results.append(list(pool.map(ask, requests())))
    assert results[0] == results[1]
    return results[0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def reference(tiny: Path) -> list[Any]:
    with Deployment(tiny, "--served-name", "tiny") as deployment:
        return answers(deployment)


@pytest.mark.timeout(180)
@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_same_tokens(tiny: Path, reference: list[Any], topology: str) -> None:
    with Deployment(tiny, "--served-name", "tiny", *TOPOLOGIES[topology]) as deployment:
        assert answers(deployment) == reference
        if topology == "preemption":
            assert deployment.metric("trireme_preemptions_total") > 0
