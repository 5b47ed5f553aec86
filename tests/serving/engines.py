"""A small engine for tests of the front end: speaks the wire messages, emits scripted tokens, dies and stalls on demand.

No model, no sockets: it is a Link factory for EngineClient and runs as one task on the test's loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from tests.models.tiny import EOS
from trireme.engine_core.outputs import FrontOutputs
from trireme.serving.engines.client import EngineClient
from trireme.transport.sockets.names import Disconnected
from trireme.transport.wire.messages import (
    Abort,
    Call,
    CallReply,
    End,
    EngineDown,
    EngineFacts,
    First,
    Hello,
    LogprobRow,
    StepOutputs,
    Submit,
    Welcome,
    Wire,
)

Script = Callable[[Submit], list[int]]


def words(*parts: str | int) -> list[int]:
    """Token ids of T-byte: strings as bytes, numbers as they are."""
    ids: list[int] = []
    for part in parts:
        ids += [part] if isinstance(part, int) else list(part.encode())
    return ids


class FakeLink:
    def __init__(self, engine: FakeEngine, on_message: Callable[[Any], None]) -> None:
        self.engine = engine
        self.on_message = on_message
        self.is_up = False
        self.closed = False

    @property
    def server_stalled(self) -> str:
        return self.engine.stalled

    @property
    def silent_s(self) -> float:
        return self.engine.silent_s

    def send(self, message: Wire) -> bool:
        if not self.is_up or self.engine.takes_nothing:
            return False
        self.engine.on_front(self, message)
        return True

    def counts(self) -> dict[str, int]:
        return {"malformed": 0}

    def close(self) -> None:
        self.closed = True


class _Row:
    def __init__(self, link: FakeLink, submit: Submit, script: list[int]) -> None:
        self.link, self.submit, self.script, self.num_done = link, submit, script, 0


class FakeEngine:
    """Every step each live row gains one token of `script(submit)`, then EOS for ever. Time passes by `step_s` per step.

    `hold` stops the steps; `die` and `revive` end and renew its life; `log` has every message received.
    """

    def __init__(
        self, script: Script | list[int] | None = None, *, index: int = 0, step_s: float = 0.0, **facts: int
    ) -> None:
        self.script: Script = script if callable(script) else lambda _: list(script or [])
        self.index = index
        self.step_s = step_s
        known = {"max_len": 2048, "vocab_size": 300, "num_blocks": 64, "block_size": 16}
        known |= {"max_num_seqs": 64, "max_waiting": 256, "max_waiting_tokens": 16384} | facts
        self.facts = EngineFacts(engine=index, **known)
        self.epoch = 0
        self.step = 0
        self.log: list[Wire] = []
        self.aborted: list[int] = []
        self.takes_nothing = False
        self.queued_s = 0.01  # what it says of every row
        self.refuses: str | None = None
        self.refusal_code = "overloaded"
        self.places = False  # says at once that a row is in the batch
        self.stats: dict[str, int] = {}  # what it answers instead of what is so
        self.is_up = True
        self.stalled, self.silent_s = "", 0.0  # as a Pong, or its absence, would tell
        self.never = asyncio.Event()
        self.hold = asyncio.Event()
        self.hold.set()
        self.rows: dict[int, _Row] = {}
        self._links: list[FakeLink] = []
        self._work = asyncio.Event()
        self._task: asyncio.Task[None] | None = None

    # ------------------------------------------------------------ as a Connect

    def __call__(self, on_message: Callable[[Any], None]) -> FakeLink:
        link = FakeLink(self, on_message)
        self._links.append(link)
        loop = asyncio.get_running_loop()
        if self._task is None:
            self._task = loop.create_task(self._run())
        if self.is_up:
            loop.call_soon(self._welcome, link)
        return link

    def _welcome(self, link: FakeLink) -> None:
        link.is_up = True
        link.on_message(Welcome(1, b"", "engine", f"engine-{self.index}", self.epoch, 1, self.facts))

    def die(self, cause: str = "", reason: str = "the process ended") -> None:
        self.is_up = False
        self.rows.clear()
        for link in self._links:
            if cause:
                link.on_message(EngineDown(engine=self.index, error=cause))
            link.is_up = False
            link.on_message(Disconnected(reason))

    def tear(self, reason: str = "a message arrived broken") -> None:
        """The connection breaks and comes back; the engine lives on and has ended what came over it."""
        self.rows.clear()
        for link in self._links:
            link.is_up = False
            link.on_message(Disconnected(reason, is_torn=True))
            self._welcome(link)

    def revive(self) -> None:
        self.is_up = True
        self.epoch += 1
        for link in self._links:
            self._welcome(link)

    def reclaim(self, to: int, waited_s: float = 0.0) -> None:
        """Forgets the rows that never began, and tells their front ends."""
        for link in self._links:
            rids = [rid for rid, row in self.rows.items() if row.link is link and row.num_done == 0]
            for rid in rids:
                del self.rows[rid]
            returned = [(rid, to, waited_s) for rid in rids]
            link.on_message(StepOutputs(self.index, self.step, b"", b"", returned=returned))

    def refuse_queued(self, error: str, retry_after_s: float) -> None:
        """Ends all rows as a queue does that is too long after all."""
        for link in self._links:
            rids = [rid for rid, row in self.rows.items() if row.link is link]
            ends = [
                End(rid, "error", error=error, error_code="overloaded", retry_after_s=retry_after_s) for rid in rids
            ]
            for rid in rids:
                del self.rows[rid]
            link.on_message(StepOutputs(self.index, self.step, b"", b"", ends=ends))

    def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()

    # ------------------------------------------------------------ as an engine

    def on_front(self, link: FakeLink, message: Wire) -> None:
        self.log.append(message)
        if isinstance(message, Hello):
            return
        if isinstance(message, Submit):
            if self.refuses is not None:
                end = End(message.rid, "error", error=self.refuses, error_code=self.refusal_code)
                asyncio.get_running_loop().call_soon(link.on_message, StepOutputs(self.index, 0, b"", b"", ends=[end]))
                return
            self.rows[message.rid] = _Row(link, message, self.script(message))
            if self.places:
                begun = StepOutputs(self.index, self.step, b"", b"", placed=[message.rid])
                asyncio.get_running_loop().call_soon(link.on_message, begun)
            self._work.set()
        elif isinstance(message, Abort):
            for rid in message.rids:
                self.aborted.append(rid)
                self.rows.pop(rid, None)
        elif isinstance(message, Call):
            stats = {"num_running": len(self.rows), "num_waiting": 0, "blocks_free": 64, "steps": self.step}
            stats |= {"epoch": self.epoch, **self.stats}
            reply = CallReply(message.call_id, True, stats) if message.method == "stats" else None
            reply = reply or CallReply(message.call_id, False, error=f"no method {message.method}")
            asyncio.get_running_loop().call_soon(link.on_message, reply)

    async def _run(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(self.step_s)
            await self.hold.wait()
            self.run_step()
            if not self.rows:
                self._work.clear()

    def run_step(self) -> None:
        """One token for every row, one message per link."""
        self.step += 1
        for link in self._links:
            mine = [row for row in self.rows.values() if row.link is link]
            if mine and link.is_up:
                link.on_message(self._outputs(mine))

    def _outputs(self, rows: list[_Row]) -> StepOutputs:
        out = FrontOutputs()
        for row in rows:
            submit, params = row.submit, row.submit.params
            if row.num_done == 0:
                self._begin(row, out)
            if params.max_tokens == 0:
                self._end(row, out, "length", -1)
                continue
            token = row.script[row.num_done] if row.num_done < len(row.script) else EOS
            row.num_done += 1
            if params.logprobs >= 0:
                out.logprobs.append(_scores(submit.rid, [token], params.logprobs))
            out.add(submit.rid, token)
            if token in params.eos_token_ids or token in params.stop_token_ids:
                self._end(row, out, "stop", token)
            elif submit.num_replayed + row.num_done >= params.max_tokens:
                self._end(row, out, "length", -1)
        return out.to_message(self.index, self.step)

    def _begin(self, row: _Row, out: FrontOutputs) -> None:
        submit = row.submit
        if submit.params.max_tokens:
            out.firsts.append(First(submit.rid, num_cached=3, queued_s=self.queued_s, prefill_s=0.02))
        if submit.params.prompt_logprobs >= 0 and len(submit.prompt) > 1:
            ids = submit.prompt[1 : len(submit.prompt) - submit.num_replayed].tolist()
            half = len(ids) // 2
            for part in (ids[:half], ids[half:]):
                out.prompt_logprobs.append(_scores(submit.rid, part, submit.params.prompt_logprobs))

    def _end(self, row: _Row, out: FrontOutputs, reason: Any, stop: int) -> None:
        del self.rows[row.submit.rid]
        out.ends.append(End(row.submit.rid, reason, stop))


def _scores(rid: int, tokens: list[int], k: int) -> LogprobRow:
    """Made-up values: the token itself at -0.5, then ids 65, 66, ... at -1, -2, ..."""
    ids = [[token, *(65 + i for i in range(k))] for token in tokens]
    values = [[-0.5, *(-1.0 - i for i in range(k))] for _ in tokens]
    shape = (len(tokens), 1 + k)
    return LogprobRow(
        rid,
        np.array(ids, dtype=np.int32).reshape(shape),
        np.array(values, dtype=np.float32).reshape(shape),
        np.ones(len(tokens), dtype=np.int32),
    )


def client_of(*engines: FakeEngine, **options: Any) -> EngineClient:
    """A started client of these engines. Call inside the loop."""
    client = EngineClient(engines, **options)
    client.start()
    return client
