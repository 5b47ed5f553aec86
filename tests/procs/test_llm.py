"""The Python API over real engines: in this process, over processes, and joined to a running server; same tokens everywhere."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from tests.e2e.deployment import Deployment
from tests.models.tiny import make_stub, make_tiny_llama
from trireme import LLM, AsyncLLM, Client, SamplingParams
from trireme.errors import ConfigError, EngineError, ModelError, OverloadedError, RequestError, TriremeError

GREEDY = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
SEEDED = SamplingParams(max_tokens=12, temperature=1.0, seed=7, n=2, ignore_eos=True)
PROMPTS = ["The oars", "strike as one", "three banks of them, one stroke, and the ship moves on " * 4]
SMALL = {"kv_memory": "4MiB", "max_len": 512, "threads": 1}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny_llama(tmp_path_factory.mktemp("tiny"))


def tokens(outputs):
    return [[answer.token_ids for answer in output.outputs] for output in outputs]


@pytest.fixture(scope="module")
def alone(tiny):
    """What one engine in this process says; every other topology must say the same."""
    with LLM(tiny, **SMALL) as llm:
        assert llm.config.parallel.executor == "inproc"
        outputs = [llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, SEEDED)]
        one_by_one = [llm.generate(prompt, GREEDY) for prompt in PROMPTS]
        streamed = [tuple(t for d in llm.stream(prompt, GREEDY) for t in d.token_ids) for prompt in PROMPTS]
        assert tokens(one_by_one) == tokens(outputs[0]) == [[ids] for ids in streamed]
        assert "".join(d.text for d in llm.stream(PROMPTS[0], GREEDY)) == one_by_one[0].text
        stats = llm.stats()
        assert stats["num_running"] == stats["num_waiting"] == stats["blocks_owned"] == 0
    return tokens(outputs[0]), tokens(outputs[1])


def test_a_long_list_of_prompts_waits_as_long_as_it_takes(tmp_path: Path) -> None:
    """Nobody is at the other end of the queue: there is a limit only where somebody sets one."""
    slow = make_tiny_llama(tmp_path / "slow", fake={"delay_ms": 5.0})
    settings = {**SMALL, "worker": "fake", "max_num_seqs": 1}
    long = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    with LLM(slow, **settings, queue_timeout=0.2) as llm, pytest.raises(OverloadedError, match="no place in the batch"):
        llm.generate(PROMPTS, long)
    with LLM(slow, **settings) as llm:
        assert llm.config.scheduler.queue_timeout == 0
        assert llm.config.scheduler.itl_target == "off"
        assert llm.config.scheduler.max_wait > 0, "that of a server; it concerns only who has a limit"
        assert [len(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, long)] == [60] * 3


def test_seeds_and_choices_differ_but_repeat(alone):
    greedy, seeded = alone
    assert all(len(ids) == 12 for choices in greedy + seeded for ids in choices)
    assert all(first != second for first, second in seeded)


@pytest.mark.parametrize("shape", [{"tp": 2}, {"dp": 2}, {"executor": "procs"}], ids=str)
def test_other_topologies_say_the_same(tiny, alone, shape):
    with LLM(tiny, **SMALL, **shape) as llm:
        assert (tokens(llm.generate(PROMPTS, GREEDY)), tokens(llm.generate(PROMPTS, SEEDED))) == alone


@pytest.mark.parametrize("shape", [{}, {"executor": "procs"}, {"dp": 2}], ids=str)
def test_an_engine_sleeps_and_work_wakes_it(tmp_path, shape):
    """The fake worker loses its KV memory in a sleep, and a step during one is an error."""
    with LLM(make_stub(tmp_path), worker="fake", **SMALL, **shape) as llm:
        before = tokens(llm.generate(PROMPTS, GREEDY))
        for level in (1, 2):
            llm.sleep(level)
            assert llm.stats()["state"] == "asleep"
            assert llm.stats()["blocks_cached"] == 0
            assert tokens(llm.generate(PROMPTS, GREEDY)) == before
        llm.sleep()
        llm.sleep(2)
        llm.sleep()
        llm.wake()
        llm.wake()
        assert llm.stats()["state"] == "awake"
        with pytest.raises(EngineError, match="no sleep of level 9"):
            llm.sleep(9)
        stream = llm.stream(PROMPTS[0], SamplingParams(max_tokens=400, temperature=0, ignore_eos=True))
        next(stream)
        with pytest.raises(EngineError, match="1 requests are under way"):
            llm.sleep()
        stream.close()
        assert tokens(llm.generate(PROMPTS, GREEDY)) == before


def test_a_cpu_does_not_sleep_and_goes_on(tiny, alone):
    with LLM(tiny, **SMALL) as llm:
        with pytest.raises(EngineError, match="an engine on a CPU has no sleep"):
            llm.sleep()
        assert llm.stats()["state"] == "awake"
        assert tokens(llm.generate(PROMPTS, GREEDY)) == alone[0]


async def test_async_streams_side_by_side(tiny, alone):
    import asyncio

    async def collect(llm, prompt):
        return tuple([t async for d in llm.stream(prompt, GREEDY) for t in d.token_ids])

    async with AsyncLLM(tiny, **SMALL) as llm:
        streams = await asyncio.gather(*(collect(llm, prompt) for prompt in PROMPTS))
        assert [[ids] for ids in streams] == alone[0]
        with pytest.raises(RequestError, match="context"):
            await llm.generate("x" * 600)
        assert (await llm.chat([{"role": "user", "content": "hi"}], GREEDY)).outputs[0].finish_reason == "length"


@pytest.mark.parametrize("shape", [{}, {"executor": "procs"}], ids=str)
def test_a_broken_model_is_the_callers_error(tmp_path, shape):
    make_tiny_llama(tmp_path)
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    with pytest.raises(TriremeError, match="not a safetensors file"):
        LLM(tmp_path, **SMALL, **shape)


def test_wrong_settings_are_refused_before_anything_starts(tiny):
    with pytest.raises(ConfigError, match="did you mean max_len"):
        LLM(tiny, max_length=5)
    with pytest.raises(ConfigError, match="--max-len is 99999"):
        LLM(tiny, max_len=99999)
    with pytest.raises(ModelError, match="no model"):
        LLM(tiny / "nothing")


def test_closing_leaves_nothing_behind(tiny):
    import threading

    before = set(threading.enumerate())
    llm = LLM(tiny, **SMALL)
    llm.close()
    llm.close()
    assert set(threading.enumerate()) <= before


def test_a_client_joins_a_running_server(tmp_path, monkeypatch):
    """RPC without HTTP: the same model, the same engine, found by itself when it is the only one."""
    short = tempfile.mkdtemp(prefix="t-")  # unix socket paths are short
    monkeypatch.setenv("TMPDIR", short)
    monkeypatch.setattr(tempfile, "tempdir", short)
    with pytest.raises(ConfigError, match="no server"):
        Client()
    with Deployment(make_stub(tmp_path), "--worker", "fake", "--served-name", "fake") as served:
        (directory,) = Path(short).glob("trireme-*")
        with Client() as client, Client(directory) as second:
            output = client.generate("hello", GREEDY)
            assert output.outputs[0].token_ids == second.generate("hello", GREEDY).outputs[0].token_ids
            assert "".join(d.text for d in client.stream("hello", GREEDY)) == output.text
            assert [state.is_up for state in client.health()] == [True]
            assert client.stats()["finished"] >= 3
            body = {"model": "fake", "prompt": "hello", "max_tokens": 12, "temperature": 0, "ignore_eos": True}
            assert served.post("/v1/completions", body)["choices"][0]["text"] == output.text
        assert (directory / "client.pass").stat().st_mode & 0o777 == 0o600
        assert os.stat(directory).st_mode & 0o777 == 0o700
