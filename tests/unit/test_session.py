"""The Python API over a scripted engine: order, streams, cancel, errors, room. Real engines come in tests/procs/test_llm.py."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from tests.models.tiny import EOS, make_stub
from tests.serving.engines import FakeEngine
from trireme.config import EngineConfig
from trireme.errors import EngineDeadError, RequestError
from trireme.launch.api.session import AsyncSession, Session
from trireme.launch.api.view import ProgressView
from trireme.params import SamplingParams
from trireme.serving.engines.client import EngineClient
from trireme.settings import load


def echo(submit):
    """The prompt in capitals, then the end."""
    return [*(bytes(submit.prompt.tolist()).upper()), EOS]


class Scripted:
    """A deployment of one scripted engine, made in the loop that uses it."""

    def __init__(self, script=echo, **facts):
        self.script, self.facts = script, facts
        self.num_closed = 0
        self.lives = {}  # nothing is launched

    def start(self):
        pass

    def client(self):
        self.engine = FakeEngine(self.script, **self.facts)
        return EngineClient([self.engine], migration_limit=0, engine_wait_s=0.0)

    def close(self):
        self.num_closed += 1


@pytest.fixture
def config(tmp_path) -> EngineConfig:
    return load({"model": str(make_stub(tmp_path))}, environ={}).config


def session_of(config, deployment):
    return AsyncSession(config, [], deployment, ProgressView(False))


async def test_generate_gives_text_tokens_and_times(config):
    async with session_of(config, Scripted()) as session:
        output = await session.generate("abc", SamplingParams(max_tokens=8, logprobs=1))
    assert output.text == "ABC"
    assert output.prompt == "abc"
    assert output.prompt_token_ids == tuple(b"abc")
    (answer,) = output.outputs
    assert answer.finish_reason == "stop"
    assert answer.token_ids == (*b"ABC", EOS)
    assert output.total_s >= (output.first_token_s or -1) >= 0


async def test_choices_stops_and_token_ids(config):
    async with session_of(config, Scripted()) as session:
        output = await session.generate(list(b"xyz"), SamplingParams(max_tokens=8, n=3, stop=("Z",)))
    assert output.prompt is None
    assert [answer.text for answer in output.outputs] == ["XY"] * 3
    assert [answer.stop_reason for answer in output.outputs] == ["Z"] * 3


async def test_a_stream_joined_is_the_whole(config):
    async with session_of(config, Scripted()) as session:
        deltas = [delta async for delta in session.stream("hello", SamplingParams(max_tokens=9))]
    assert "".join(delta.text for delta in deltas) == "HELLO"
    assert [delta.finish_reason for delta in deltas].count("stop") == 1
    assert deltas[-1].finish_reason == "stop"


async def test_a_conversation_goes_through_the_template(config):
    talk = [{"role": "user", "content": "hi"}]
    async with session_of(config, Scripted()) as session:
        output = await session.chat(talk, SamplingParams(max_tokens=64))
        assert output.text == "USER: HI\nASSISTANT: "
        with pytest.raises(RequestError, match="role"):
            await session.chat([{"role": "robot", "content": "hi"}])
        with pytest.raises(RequestError, match="not a list of messages"):
            await session.chat([{"content": "hi"}])


async def test_leaving_a_stream_aborts_it(config):
    deployment = Scripted([65] * 500, step_s=0.001)
    async with session_of(config, deployment) as session:
        async with aclosing(session.stream("x", SamplingParams(max_tokens=500))) as deltas:
            async for _ in deltas:
                break
        await asyncio.sleep(0.05)
        assert len(deployment.engine.aborted) == 1
        task = asyncio.create_task(session.generate("x", SamplingParams(max_tokens=500)))
        await asyncio.sleep(0.02)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await asyncio.sleep(0.02)
        assert len(deployment.engine.aborted) == 2
        assert session.health()[0].num_rows == 0


async def test_an_engines_death_is_the_callers_error(config):
    deployment = Scripted([65] * 500, step_s=0.001)
    async with session_of(config, deployment) as session:
        task = asyncio.create_task(session.generate("x", SamplingParams(max_tokens=500)))
        await asyncio.sleep(0.02)
        deployment.engine.die("out of memory")
        with pytest.raises(EngineDeadError, match="out of memory"):
            await task


async def test_not_started_and_closed_say_so(config):
    session = session_of(config, deployment := Scripted())
    with pytest.raises(RuntimeError, match="not started"):
        await session.generate("x")
    await session.start()
    await session.close()
    await session.close()
    assert deployment.num_closed == 2
    with pytest.raises(RuntimeError, match="closed"):
        await session.generate("x")


async def test_a_failed_start_lets_go_of_everything(config):
    deployment = Scripted()

    def fail():
        raise EngineDeadError("no such luck")

    deployment.start = fail
    with pytest.raises(EngineDeadError, match="no such luck"):
        await session_of(config, deployment).start()
    assert deployment.num_closed == 1


# ---------------------------------------------------------------- blocking


@pytest.fixture
def blocking(config):
    opened = []

    def start(*args, **kw):
        opened.append(Session(session_of(config, Scripted(*args, **kw))))
        return opened[-1]

    yield start
    for session in opened:
        session.close()
        session.close()


def test_one_text_gives_one_output_and_a_list_a_list(blocking):
    session = blocking()
    assert session.generate("a", SamplingParams(max_tokens=4)).text == "A"
    assert [o.text for o in session.generate(["a", "bc"], SamplingParams(max_tokens=4))] == ["A", "BC"]
    assert [o.text for o in session.generate([[97], [98]], SamplingParams(max_tokens=4))] == ["A", "B"]
    assert session.generate([]) == []
    talks = [[{"role": "user", "content": text}] for text in "ab"]
    assert [o.text[6] for o in session.chat(talks, SamplingParams(max_tokens=64))] == ["A", "B"]
    assert session.chat(talks[0], SamplingParams(max_tokens=64)).text.startswith("USER: A")


def test_many_more_prompts_than_room_come_back_in_order(blocking):
    session = blocking(max_num_seqs=2, max_waiting=2, max_waiting_tokens=64)
    prompts = [f"prompt {i:03}" for i in range(60)]
    outputs = session.generate(prompts, SamplingParams(max_tokens=32))
    assert [output.text for output in outputs] == [prompt.upper() for prompt in prompts]


def test_params_per_prompt(blocking):
    session = blocking()
    outputs = session.generate(["abcd", "abcd"], [SamplingParams(max_tokens=1), SamplingParams(max_tokens=3)])
    assert [output.text for output in outputs] == ["A", "ABC"]
    assert [output.outputs[0].finish_reason for output in outputs] == ["length", "length"]
    with pytest.raises(ValueError, match="2 prompts but 1 params"):
        session.generate(["a", "b"], [SamplingParams()])


def test_wrong_types_are_refused_with_their_field(blocking):
    session = blocking()
    talk = [{"role": "user", "content": "hi"}]
    for call, args, param in (
        (session.generate, (None,), "prompts"),
        (session.generate, (5,), "prompts"),
        (session.generate, (b"x",), "prompts"),
        (session.generate, ({"prompt": "x"},), "prompts"),
        (session.generate, ([1, 2, 3],), "prompts[0]"),
        (session.generate, (["x", None],), "prompts[1]"),
        (session.generate, (["x", {"prompt": "x"}],), "prompts[1]"),
        (session.generate, ([[1.9]],), "prompts[0][0]"),
        (session.generate, ([["260"]],), "prompts[0][0]"),
        (session.generate, ([[97], [1, True]],), "prompts[1][1]"),
        (session.generate, ([np.array([1.5])],), "prompts[0][0]"),
        (session.generate, ("x", {"max_tokens": 4}), "params"),
        (session.generate, ("x", "fast"), "params"),
        (session.generate, ("x", [{"max_tokens": 4}]), "params"),
        (session.chat, (None,), "messages"),
        (session.chat, ("hello",), "messages"),
        (session.chat, ({"role": "user", "content": "x"},), "messages"),
        (session.chat, ([5],), "messages"),
        (session.chat, (talk, {"max_tokens": 4}), "params"),
    ):
        with pytest.raises(RequestError) as caught:
            call(*args)
        assert caught.value.param == param, args
    for salt in (5, b"x"):
        with pytest.raises(RequestError, match="salt"):
            session.generate("x", salt=salt)
    for call, args in ((session.stream, (None,)), (session.stream, ([1.5],)), (session.stream, ("x", {}))):
        with pytest.raises(RequestError):
            list(call(*args))
    assert session._session._client.num_choices == 0


def test_one_stop_text_is_one_stop_text(blocking):
    session = blocking()
    assert session.generate("abcdef", SamplingParams(max_tokens=8, stop="DE")).text == "ABC"
    output = session.generate([np.array([97, 98], np.int32)], SamplingParams(max_tokens=8, stop_token_ids=[66]))[0]
    assert (output.text, output.outputs[0].stop_reason) == ("A", 66)


def test_nothing_is_sent_when_one_prompt_is_wrong(blocking):
    session = blocking()
    with pytest.raises(RequestError, match="max_tokens"):
        session.generate(["a", "b" * 2000], SamplingParams(max_tokens=200))
    assert session.generate("a", SamplingParams(max_tokens=4)).text == "A"
    assert session._session._client.num_choices == 0


def test_a_progress_bar_counts_requests(blocking, capsys):
    blocking().generate(["a", "b", "c"], SamplingParams(max_tokens=4), progress=True)
    assert "3/3" in capsys.readouterr().err


def test_a_blocking_stream(blocking):
    session = blocking()
    assert "".join(d.text for d in session.stream("hi", SamplingParams(max_tokens=9))) == "HI"
    talk = [{"role": "user", "content": "hi"}]
    assert "".join(d.text for d in session.stream_chat(talk, SamplingParams(max_tokens=64))).startswith("USER: HI")
    assert session.health()[0].is_up
