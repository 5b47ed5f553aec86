"""The loop thread: results, errors, items, and Ctrl-C as cancel that has ended before the caller goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import threading

import pytest

from trireme.launch.api.blocking import LoopThread


@pytest.fixture(autouse=True)
def _interrupts():
    """A shell starts background jobs with SIGINT ignored; these tests are about what happens when it is not."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture
def loop():
    thread = LoopThread("test")
    yield thread
    thread.close()
    assert not thread.is_running


def test_result_and_error(loop):
    async def double(x):
        await asyncio.sleep(0)
        return 2 * x

    async def fail():
        raise ValueError("no")

    assert loop.wait(double(4)) == 8
    with pytest.raises(ValueError, match="no"):
        loop.wait(fail())


def test_items_come_in_order_and_leaving_early_closes(loop):
    closed = threading.Event()

    async def count():
        try:
            for i in range(1000):
                yield i
        finally:
            closed.set()

    taken = []
    items = loop.iterate(count())
    for item in items:
        taken.append(item)
        if item == 2:
            break
    items.close()
    assert taken == [0, 1, 2]
    assert closed.is_set()


def test_interrupt_cancels_there_before_going_on_here(loop):
    ended = threading.Event()

    async def wait_for_ever():
        try:
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.05)
            ended.set()

    with pytest.raises(KeyboardInterrupt):
        loop.wait(wait_for_ever())
    assert ended.is_set()


def test_interrupt_in_the_middle_of_items_closes_the_generator(loop):
    ended = threading.Event()

    async def drip():
        try:
            yield 1
            threading.Timer(0.05, os.kill, [os.getpid(), signal.SIGINT]).start()
            await asyncio.sleep(20)
            yield 2
        finally:
            ended.set()

    taken: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        taken.extend(loop.iterate(drip()))
    assert ended.is_set()


def test_close_cancels_what_still_runs():
    thread = LoopThread("test")
    ended = threading.Event()

    async def background():
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    async def start():
        task = asyncio.create_task(background())
        await asyncio.sleep(0)
        return task

    task = thread.wait(start())
    thread.close()
    thread.close()
    assert ended.is_set()
    assert task.cancelled()
