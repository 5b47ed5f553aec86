"""The task of one request, as a route of the HTTP server would run it: submit, read, and go when the reader goes."""

from __future__ import annotations

import asyncio

from tests.sim.books import Answer
from trireme.errors import TriremeError
from trireme.serving.engines.client import EngineClient


async def read(client: EngineClient, answer: Answer) -> None:
    """Reads one request to its end, and keeps the books about it."""
    ask = answer.ask
    task = asyncio.current_task()
    assert task is not None
    if ask.leaves_after_s:
        asyncio.get_running_loop().call_later(ask.leaves_after_s, task.cancel)
    answer.begin()
    try:
        stream = await client.submit(ask.replays, pin=ask.pin)
    except TriremeError as error:
        answer.refused(error)
        return
    except asyncio.CancelledError:
        answer.left()
        return
    answer.placed()
    try:
        while not stream.is_done:
            for index, event in await stream.next():
                answer.take(index, event)
            for index in answer.stopping():
                stream.abort(index)
            if ask.read_s:
                await asyncio.sleep(ask.read_s)
    except asyncio.CancelledError:
        answer.left()
        return
    finally:
        stream.close()
    answer.ended()
