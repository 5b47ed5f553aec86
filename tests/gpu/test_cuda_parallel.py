"""One engine over several GPUs: the tokens of one card up to near ties, and ranks that are killed or stopped.

Where there are fewer than two cards the ranks share one: slow, and without NCCL, but the same code.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.e2e.deployment import Deployment, is_alive, wait_for
from tests.gpu.test_cuda_engine import (
    GREEDY,
    HOSTED,
    LENGTH,
    PROMPTS,
    SCORED,
    SEEDED,
    assert_same_up_to_ties,
    engine,
    tokens,
    write_model,
)
from trireme.models.cuda.sequence_parallel import SPLIT_FROM

CARDS = torch.cuda.device_count() if torch.cuda.is_available() else 0
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CARDS == 0, reason="needs an NVIDIA GPU"),
    pytest.mark.timeout(300),
]
SHAPES = [{"tp": 2}, {"pp": 2}, *([{"tp": 2, "pp": 2}] if CARDS >= 4 else [])]
STOPPED_S = 15.0  # after which a rank that stands still must have been noticed


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def alone(model: Path) -> dict[str, Any]:
    with engine(model) as llm:
        return {"greedy": tokens(llm.generate(PROMPTS, GREEDY)), "seeded": tokens(llm.generate(PROMPTS, SEEDED))}


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_tokens_are_those_of_one_card(model: Path, alone: dict[str, Any], shape: dict[str, int]) -> None:
    with engine(model, share_gpus=CARDS < 2, **shape) as llm:
        assert llm.config.parallel.device == "cuda"
        greedy = tokens(llm.generate(PROMPTS, GREEDY))
        assert_same_up_to_ties(model, greedy, alone["greedy"])
        for params in (SCORED, HOSTED):  # by the device and by the host, on every rank
            scored = llm.generate(PROMPTS, params)
            assert_same_up_to_ties(model, tokens(scored), greedy)
            assert all(output.outputs[0].logprobs for output in scored)
        seeded = tokens(llm.generate(PROMPTS, SEEDED))
        again = tokens(llm.generate(PROMPTS, GREEDY))
    assert_same_up_to_ties(model, again, greedy)
    same = sum(a == b for a, b in zip(seeded, alone["seeded"], strict=True))
    assert same >= len(PROMPTS) // 2  # one near tie changes all that follows


def test_sequence_parallel_changes_no_token(model: Path) -> None:
    """Beside short prompts, two that alone are long enough to be split, one of them into parts of unequal use."""
    prompts = [*PROMPTS, *([(7 * i + 3 * n) % 250 for i in range(n)] for n in (SPLIT_FROM, SPLIT_FROM + 301))]
    found = []
    for shape in ({}, {"tp": 2}, {"tp": 2, "sequence_parallel": True}):
        with engine(model, share_gpus=CARDS < 2, max_len=2048, prefix_cache=False, **shape) as llm:
            found.append(tokens(llm.generate(prompts, GREEDY)))
    for other in found[1:]:
        assert_same_up_to_ties(model, other, found[0], prompts)


def test_dummy_weights_are_the_same_numbers(model: Path, tmp_path: Path) -> None:
    """Greedy answers of a model of noise: they part at near ties only, and one of these prompts comes to none at first."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_text((model / name).read_text())
    found = []
    for shape in ({}, {"tp": 2}):
        with engine(tmp_path, load_format="dummy", share_gpus=CARDS < 2, **shape) as llm:
            found.append(tokens(llm.generate(PROMPTS, GREEDY)))
    assert all(len(ids) == LENGTH for ids in found[0])
    assert sum(a[0] == b[0] for a, b in zip(*found, strict=True)) >= len(PROMPTS) // 2


def answer(deployment: Deployment, length: int = 8) -> tuple[int, ...]:
    body = {"model": "m", "prompt": PROMPTS[1], "max_tokens": length, "temperature": 0, "ignore_eos": True}
    found = deployment.post("/v1/completions", {**body, "return_token_ids": True}, timeout_s=90)
    return tuple(found["choices"][0]["token_ids"])


def streamed_ids(events: Iterable[dict[str, Any]]) -> tuple[int, ...]:
    """The token ids of a stream of one choice, to its end. An error event fails the test."""
    ids: list[int] = []
    for event in events:
        assert "error" not in event, event
        ids += event["choices"][0].get("token_ids", ())
    return tuple(ids)


@pytest.mark.skipif(CARDS < 2, reason="needs two GPUs")
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "stopped"])
@pytest.mark.parametrize("shape", ["--tp", "--pp"])
def test_a_stream_survives_the_loss_of_a_rank(model: Path, blow: int, shape: str) -> None:
    """The other rank ends, the engine comes back, and the stream goes on with the tokens of an undisturbed one."""
    flags = ("--served-name", "m", "--device", "cuda", shape, "2", "--max-len", "1024", "--kv-memory", "256MiB")
    flags += ("--step-timeout", "10")  # a stage that waits for nobody is ended by the engine, after that long
    length = 600
    body = {"model": "m", "prompt": PROMPTS[1], "max_tokens": length, "temperature": 0, "ignore_eos": True}
    body["return_token_ids"] = True
    with Deployment(model, *flags, timeout_s=150) as deployment, ThreadPoolExecutor(1) as pool:
        undisturbed = streamed_ids(deployment.stream(body, timeout_s=60))
        before = answer(deployment)
        free = torch.cuda.mem_get_info(0)[0]
        workers = deployment.pids("trireme.workers.main")
        assert len(workers) == 2
        stream = deployment.stream(body, timeout_s=200)
        begun = streamed_ids([next(stream)])
        rest = pool.submit(streamed_ids, stream)
        os.kill(workers[1], blow)
        wait_for(lambda: not is_alive(workers[0]), STOPPED_S, "the other rank gone")
        wait_for(lambda: not is_alive(workers[1]), 5, "the rank itself gone")
        survived = begun + rest.result(200)
        assert len(begun) < length
        assert_same_up_to_ties(model, [survived], [undisturbed], [PROMPTS[1]], length=length)
        wait_for(
            lambda: deployment.status("/ready") == 200 and len(deployment.pids("trireme.workers.main")) == 2,
            120,
            "restart",
        )
        assert_same_up_to_ties(model, [answer(deployment)], [before], [PROMPTS[1]], length=8)
        assert abs(torch.cuda.mem_get_info(0)[0] - free) < 64 << 20


@pytest.mark.skipif(CARDS < 2, reason="needs two GPUs")
def test_streams_of_data_parallel_engines_survive_kills(model: Path) -> None:
    """Each engine in turn is killed while both stream: every stream goes on with the tokens of an undisturbed one."""
    flags = ("--served-name", "m", "--device", "cuda", "--dp", "2", "--max-len", "1024", "--kv-memory", "256MiB")
    length = 600
    prompts = [PROMPTS[i % len(PROMPTS)] for i in range(8)]
    bodies = [
        {"model": "m", "prompt": prompt, "max_tokens": length, "temperature": 0, "ignore_eos": True}
        | {"return_token_ids": True}
        for prompt in prompts
    ]
    with Deployment(model, *flags, timeout_s=150) as deployment, ThreadPoolExecutor(len(bodies)) as pool:

        def engines() -> list[int]:
            return deployment.pids("trireme.engine_core.main")

        undisturbed = list(pool.map(lambda body: streamed_ids(deployment.stream(body, timeout_s=60)), bodies))
        for _ in range(2):
            wait_for(lambda: deployment.status("/ready") == 200 and len(engines()) == 2, 120, "both engines")
            streams = [deployment.stream(body, timeout_s=200) for body in bodies]
            begun = [streamed_ids([next(stream)]) for stream in streams]
            assert all(len(ids) < length for ids in begun)
            os.kill(engines()[0], signal.SIGKILL)  # the older one: another each time
            rests = pool.map(streamed_ids, streams)
            survived = [a + b for a, b in zip(begun, rests, strict=True)]
            assert_same_up_to_ties(model, survived, undisturbed, prompts, length=length)
