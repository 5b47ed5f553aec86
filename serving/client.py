"""EngineClient: submits choices to engines, routes between them, and turns engine messages into events per request.

Owned by a front end process or by the Python API; free of HTTP and of text. Lives on one asyncio loop and needs no locks.
An engine's death concerns its own rows only, and these go on elsewhere (serving/migration.py). A request's task is woken at most
once per engine message, however many rows it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import msgspec

from serving.choose import Chooser
from serving.migration import judge
from serving.moves import Moves, Trial
from serving.replay import Replay
from transport.messages import (
    MAX_PREFIX,
    Abort,
    Call,
    CallReply,
    End,
    EngineDown,
    EngineFacts,
    First,
    Load,
    LogprobRow,
    Refused,
    Released,
    Route,
    Routed,
    StepOutputs,
    View,
    Welcome,
    Wire,
)
from transport.packed import unpack, unpack_ids
from transport.sockets import Left
from trireme.errors import (
    EngineDeadError,
    EngineError,
    NotFoundError,
    OverloadedError,
    QuarantinedError,
    RequestError,
    TriremeError,
)
from trireme.hashing import prompt_keys

log = logging.getLogger(__name__)

ROUTE_TIMEOUT_S = 1.0
LINK_WAIT_S = 1.0
SILENT_S = 1.0  # an engine whose loop answers no Ping for so long makes no progress
RESEND_S = 0.05  # after an engine took no message
MIGRATION_LIMIT = 2  # most moves of one choice
ENGINE_WAIT_S = 60.0  # for an engine to come up
LOAD_FIELDS = (
    "epoch",
    "progress",
    "num_waiting",
    "num_running",
    "waiting_tokens",
    "running_tokens",
    "blocks_used",
    "num_blocks",
    "oldest_wait_s",
)  # of Load, for balancers outside


class Link(Protocol):
    """What the client needs of transport's AsyncConnection and LocalConnection."""

    @property
    def is_up(self) -> bool: ...

    @property
    def server_stalled(self) -> str: ...

    @property
    def silent_s(self) -> float: ...

    def send(self, message: Wire) -> bool: ...

    def counts(self) -> dict[str, int]: ...

    def close(self) -> None: ...


Connect: TypeAlias = Callable[[Callable[[Any], None]], Link]
"""Opens one link inside the running loop; every message of the peer goes to the given callback."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a part of the prompt."""

    rows: LogprobRow


Event: TypeAlias = tuple[int, int | First | LogprobRow | PromptLogprobs | End]
"""(index of the choice in its request, a token id or what else the engine says of it). Log-probabilities come before the
tokens they belong to, End comes last."""


class EngineState(NamedTuple):
    """One engine as this front end sees it. `stalled`: why it makes no progress although it is up; "" when it does."""

    engine: int
    is_up: bool
    epoch: int
    facts: EngineFacts | None
    num_rows: int
    stalled: str
    reason: str  # why it is down


class _Row:
    """One choice of a stream, over all its moves. `rid` is that of its last submit."""

    __slots__ = (
        "has_gained",
        "index",
        "label",
        "num_scored",
        "pin",
        "replay",
        "rid",
        "stream",
        "trial",
        "wait_until",
        "was_placed",
    )

    def __init__(self, stream: Stream, index: int, replay: Replay, rid: int, label: str, wait_until: float) -> None:
        self.stream = stream
        self.index = index
        self.replay = replay
        self.rid = rid
        self.was_placed = False  # has run on its engine
        self.has_gained = False  # a token there
        self.num_scored = 0  # prompt positions whose log-probabilities came from there
        self.trial: Trial | None = None
        self.pin = -1
        self.label = label
        self.wait_until = wait_until  # while it has no engine


class _Engine:
    """One engine's link and the rows this front end has on it."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.link: Link | None = None
        self.welcome: Welcome | None = None
        self.rows: dict[int, _Row] = {}
        self.lost_epoch = -1  # the last life that has ended
        self.reason = "it has not started yet"
        self.cause = ""  # its last words

    @property
    def is_up(self) -> bool:
        return self.welcome is not None and self.link is not None and self.link.is_up

    @property
    def stalled(self) -> str:
        """Why it makes no progress: by its own word, or because its loop does not answer. "" when it does, or is not up."""
        if self.link is None or not self.is_up:
            return ""
        silent_s = self.link.silent_s
        return f"its loop has not answered for {silent_s:.1f} s" if silent_s > SILENT_S else self.link.server_stalled


class Stream:
    """Events of one request's choices. Iterate with `next`; always `close` it (twice is fine)."""

    __slots__ = ("_client", "_num_open", "_pending", "_rids", "_waiter", "replays")

    def __init__(self, client: EngineClient, replays: Sequence[Replay]) -> None:
        self.replays = replays
        self._client = client
        self._pending: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._rids: dict[int, int] = {}  # choice index -> rid, while it runs
        self._num_open = len(replays)

    @property
    def is_done(self) -> bool:
        """True when every choice has ended and every event was taken."""
        return self._num_open == 0 and not self._pending

    @property
    def num_pending(self) -> int:
        """Events that arrived and were not taken yet: grows when the reader is slow."""
        return len(self._pending)

    async def next(self) -> list[Event]:
        """All events since the last call; an empty list when everything has ended, or after `nudge`."""
        if not self._pending:
            if self._num_open == 0:
                return []
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        events, self._pending = self._pending, []
        return events

    def abort(self, index: int) -> None:
        """Ends one choice early (a stop string was found). No further event of it follows."""
        rid = self._rids.pop(index, None)
        if rid is not None:
            self._num_open -= 1
            self._client._abort([rid])
            self._wake()

    def close(self) -> None:
        """Aborts whatever still runs."""
        rids = list(self._rids.values())
        self._rids.clear()
        self._num_open = 0
        if rids:
            self._client._abort(rids)
        self._wake()

    def nudge(self) -> None:
        """Makes a waiting `next` return."""
        self._wake()

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


class EngineClient:
    """All engines of a deployment behind one `submit`. Create it anywhere, `start` it in the loop that will use it."""

    def __init__(
        self,
        engines: Sequence[Connect],
        coordinator: Connect | None = None,
        *,
        rng: random.Random | None = None,
        migration_limit: int = MIGRATION_LIMIT,
        engine_wait_s: float = ENGINE_WAIT_S,
        label: str = "",
        tells_prefix: bool = False,
        first_engine: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Rows of an engine that dies move at most `migration_limit` times. While no engine is up, requests wait for one for at
        most `engine_wait_s`. `label` is the place of this front end: the coordinator prefers engines with the same one. With
        `tells_prefix` it learns what prompts begin with. `first_engine` is the number of the first of `engines`, where these are
        not all that there are."""
        self._first = first_engine
        self._clock = clock
        self._label = label
        self._tells_prefix = tells_prefix
        self._connects = tuple(engines)
        self._connect_coordinator = coordinator
        self._engines = [_Engine(first_engine + i) for i in range(len(engines))]
        self._coordinator: Link | None = None
        self._rids = itertools.count(1)
        self._routes: dict[int, asyncio.Future[Routed]] = {}
        self._calls: dict[int, tuple[_Engine, asyncio.Future[CallReply]]] = {}
        self._changed: asyncio.Event = asyncio.Event()
        self._chooser = Chooser(rng)
        self.view: View | None = None
        self.num_fallbacks = 0  # choices made without the coordinator
        self.num_moved = self.num_quarantined = 0
        self._migration_limit = migration_limit
        self._engine_wait_s = engine_wait_s
        self._moves: Moves[_Row] = Moves(self._place_again)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Opens all links; returns at once. Call inside the loop."""
        for engine, connect in zip(self._engines, self._connects, strict=True):
            engine.link = connect(lambda message, engine=engine: self._on_engine(engine, message))  # type: ignore[misc]
        if self._connect_coordinator is not None:
            self._coordinator = self._connect_coordinator(self._on_coordinator)

    def close(self) -> None:
        """Ends every row and closes the links."""
        self._migration_limit = 0
        self._moves.close()
        self._fail_moving("the front end is closing", EngineDeadError.code)
        for engine in self._engines:
            self._lose(engine, "the front end is closing")
            if engine.link is not None:
                engine.link.close()
        if self._coordinator is not None:
            self._coordinator.close()

    def end_all(self, reason: str) -> None:
        """Ends every row with an explicit error, and tells the engines."""
        self._fail_moving(reason, OverloadedError.code)
        for engine in self._engines:
            rids = list(engine.rows)
            for rid in rids:
                self._finish(engine, rid, End(rid=rid, reason="error", error=reason, error_code=OverloadedError.code))
            if rids and engine.link is not None:
                engine.link.send(Abort(rids=rids))

    async def wait_up(self, timeout_s: float | None = None) -> None:
        """Returns when every engine is connected. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not all(engine.is_up for engine in self._engines):
                await self._wait_change()

    # ------------------------------------------------------------ state

    @property
    def facts(self) -> EngineFacts | None:
        """Facts of any engine that is up: they are alike. After all went down, those of the last one."""
        known = [engine.welcome.facts for engine in self._engines if engine.welcome and engine.welcome.facts]
        return known[0] if known else self._last_facts

    _last_facts: EngineFacts | None = None

    @property
    def num_rows(self) -> int:
        """Rows on engines, and between two of them."""
        return sum(len(engine.rows) for engine in self._engines) + len(self._moves)

    @property
    def capacity(self) -> int:
        """Rows that the engines now up can run and queue, all front ends together; while none is up, as if one were."""
        up = [engine.welcome.facts for engine in self._engines if engine.is_up and engine.welcome]
        if not up:
            up = [self._last_facts]
        return sum(facts.max_num_seqs + facts.max_waiting for facts in up if facts)

    async def loads(self, timeout_s: float = 1.0) -> dict[int, dict[str, Any]]:
        """What the engines of this front end have to do, by engine: as the coordinator knows it, or by asking them."""
        if self.view is not None and self._coordinator is not None and self._coordinator.is_up:
            members = [member for member in self.view.members if self._has(member.engine)]
            return {
                member.engine: {"state": member.state, "in_flight": member.in_flight, **_load_fields(member.load)}
                for member in members
            }

        async def ask(engine: int) -> dict[str, Any]:
            try:
                found = await self.call(engine, "stats", timeout_s)
            except (TriremeError, TimeoutError):
                return {"state": "down"}
            return {"state": "ready", "in_flight": 0, **{key: found.get(key) for key in LOAD_FIELDS}}

        numbers = [engine.index for engine in self._engines]
        return dict(zip(numbers, await asyncio.gather(*map(ask, numbers)), strict=True))

    def counts(self) -> dict[str, int]:
        """Sums over all links: malformed, dropped and such."""
        total: dict[str, int] = {}
        for link in (*(engine.link for engine in self._engines), self._coordinator):
            for key, value in (link.counts() if link is not None else {}).items():
                total[key] = total.get(key, 0) + value
        return total

    def states(self) -> list[EngineState]:
        """How each engine stands now."""
        return [
            EngineState(
                engine=engine.index,
                is_up=engine.is_up,
                epoch=engine.welcome.epoch if engine.welcome else -1,
                facts=engine.welcome.facts if engine.welcome else None,
                num_rows=len(engine.rows),
                stalled=engine.stalled,
                reason="" if engine.is_up else engine.reason,
            )
            for engine in self._engines
        ]

    async def call(self, engine: int, method: str, timeout_s: float = 5.0, **args: Any) -> Any:
        """Asks one engine (`stats`, ...). Raises EngineDeadError when it is away, EngineError when it refuses."""
        target = self._at(engine)
        call_id = next(self._rids)
        reply: asyncio.Future[CallReply] = asyncio.get_running_loop().create_future()
        self._calls[call_id] = (target, reply)
        try:
            if target.link is None or not target.link.send(Call(call_id=call_id, method=method, args=args)):
                raise EngineDeadError(f"engine {engine} is not connected: {target.reason}")
            async with asyncio.timeout(timeout_s):
                answer = await reply
        finally:
            self._calls.pop(call_id, None)
        if not answer.ok:
            raise EngineError(answer.error)
        return answer.result

    # ------------------------------------------------------------ requests

    async def submit(self, replays: Sequence[Replay], *, pin: int = -1, label: str = "") -> Stream:
        """Sends all choices of a request; choices of one prompt (adjacent, same `prompt_index`) go to the same engine.

        `pin` >= 0 demands that engine; `label` asks for one near another place than ours. While no engine is up it waits. Raises
        OverloadedError, EngineDeadError, NotFoundError (no such engine).
        """
        if pin >= 0 and not self._has(pin):
            raise NotFoundError(
                f"there is no engine {pin} here, but {self._first}..{self._engines[-1].index}",
                param="x-data-parallel-rank",
            )
        groups = [list(group) for _, group in itertools.groupby(replays, key=lambda replay: replay.prompt_index)]
        stream = Stream(self, replays)
        index = 0
        try:
            for group in groups:
                until = self._wait_until(group[0])
                route = self._route_for(group[0], len(group), pin, label or self._label)
                engine, ticket = await self._place(route, until)
                for replay in group:
                    replay.stays = pin >= 0
                    self._send(_Row(stream, index, replay, next(self._rids), route.label, until), engine, ticket)
                    index += 1
        except BaseException:
            stream.close()
            raise
        return stream

    def _send(self, row: _Row, engine: _Engine, ticket: int) -> None:
        engine.rows[row.rid] = row
        self._chooser.started(engine.index)
        row.stream._rids[row.index] = row.rid
        if engine.link is None or not engine.link.send(row.replay.submit(row.rid, ticket)):
            del engine.rows[row.rid]
            self._chooser.ended(engine.index)
            self._on_unsent(row, f"engine {engine.index} takes no more messages" if engine.is_up else engine.reason)

    def _on_unsent(self, row: _Row, why: str) -> None:
        """The engine's queue is full, or its link is about to be down: once more, soon."""
        if self._clock() + RESEND_S < row.wait_until:
            self._moves.start([row], [], RESEND_S)
        else:
            self._end(row, End(row.rid, "error", error=why, error_code=EngineDeadError.code))

    def _abort(self, rids: Iterable[int]) -> None:
        self._moves.drop(rids)
        for engine in self._engines:
            mine = [rid for rid in rids if rid in engine.rows]
            for rid in mine:
                _settle(engine.rows.pop(rid))
            if mine:
                self._chooser.ended(engine.index, len(mine))
                if engine.link is not None:
                    engine.link.send(Abort(rids=mine))

    # ------------------------------------------------------------ moves

    def _resubmit(self, source: _Engine, returned: Iterable[tuple[int, int, float]]) -> None:
        """Rows that an engine has given back, without an end and without having run them, go on elsewhere (at the engine it
        names, if that is up). What they have waited counts against their deadlines."""
        rows = []
        for rid, to, waited_s in returned:
            if (row := source.rows.pop(rid, None)) is not None:
                row.pin = to if self._has(to) else -1
                row.replay.has_waited(waited_s)
                rows.append(row)
        self._chooser.ended(source.index, len(rows))
        self._send_on(rows, [])

    def _move(self, rows: Sequence[_Row], cause: str) -> None:
        """These rows have lost their engine: they go on elsewhere, or end with an error that says why not."""
        verdict = judge(rows, self._migration_limit)
        for row in verdict.guilty:
            self.num_quarantined += 1
            text = f"two engines died while they ran this request, the last one of this: {cause}; it is not tried again"
            self._end(row, End(row.rid, "error", error=text, error_code=QuarantinedError.code))
        for row in verdict.spent:
            moves = f" after {row.replay.num_moves - 1} moves" if row.replay.num_moves > 1 else ""
            self._end(row, End(row.rid, "error", error=cause + moves, error_code=EngineDeadError.code))
        for row in rows:
            row.pin = -1
        self._send_on(verdict.free, verdict.trials)

    def _send_on(self, free: Sequence[_Row], trials: Sequence[Sequence[_Row]]) -> None:
        for row in (*free, *itertools.chain.from_iterable(trials)):
            self.num_moved += 1
            row.was_placed = row.has_gained = False
            row.num_scored = 0
            row.wait_until = self._wait_until(row.replay)
            _settle(row)
        self._moves.start(free, trials)

    async def _place_again(self, row: _Row) -> None:
        """Sends a row that has no engine to one. Never raises for want of an engine: the row ends then."""
        try:
            engine, ticket = await self._place_soon(row)
        except TriremeError as error:
            if self._moves.take(row):
                self._end(row, End(row.rid, "error", error=error.message, error_code=error.code))
            return
        if not self._moves.take(row):  # it was aborted meanwhile
            if ticket and engine.welcome is not None:
                self._release(Routed(row.rid, engine.index, engine.welcome.epoch, ticket))
            return
        row.rid = next(self._rids)
        self._send(row, engine, ticket)

    async def _place_soon(self, row: _Row) -> tuple[_Engine, int]:
        """At the engine that it is meant for, if it is there at once; else as any other."""
        route = self._route_for(row.replay, 1, row.pin, row.label)
        if route.pin >= 0:
            with contextlib.suppress(EngineDeadError):
                return await self._place_once(route)
            route = msgspec.structs.replace(route, pin=-1)
        return await self._place(route, row.wait_until)

    def _fail_moving(self, reason: str, code: str) -> None:
        for row in self._moves.take_all():
            self._end(row, End(row.rid, "error", error=reason, error_code=code))

    def _wait_until(self, replay: Replay) -> float:
        """How long a row may be without an engine."""
        wait_s = self._engine_wait_s
        if replay.deadline_s > 0:
            wait_s = min(wait_s, replay.deadline_s)
        return self._clock() + wait_s

    def _route_for(self, replay: Replay, num_choices: int, pin: int, label: str) -> Route:
        facts, keys = self.facts, b""
        if facts is not None and self._tells_prefix:
            keys = prompt_keys(replay.prompt, facts.block_size, salt=replay.salt, most=MAX_PREFIX)
        return Route(0, replay.num_tokens, num_choices, pin, label, keys)

    # ------------------------------------------------------------ placement

    async def _place(self, route: Route, until: float) -> tuple[_Engine, int]:
        """An engine that is up, and the ticket for it. Raises EngineDeadError when none comes up before `until`."""
        candidates = [self._at(route.pin)] if route.pin >= 0 else self._engines
        while True:
            if not any(engine.is_up for engine in candidates):
                await self._wait_up(candidates, until)
            try:
                return await self._place_once(route)
            except EngineDeadError:
                if self._clock() >= until:
                    raise

    async def _wait_up(self, candidates: Sequence[_Engine], until: float) -> None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until - self._clock()):
                while not any(engine.is_up for engine in candidates):
                    await self._wait_change()

    async def _place_once(self, route: Route) -> tuple[_Engine, int]:
        pin = route.pin
        if self._connect_coordinator is None:
            return self._place_alone(pin), 0
        for _ in range(3):
            routed = await self._route(msgspec.structs.replace(route, rid=next(self._rids)))
            if routed is None or not self._has(routed.engine):
                # away, or just back and not yet told what our own links know
                self.num_fallbacks += 1
                return self._place_alone(pin), 0
            engine = self._at(routed.engine)
            if await self._is_there(engine, routed):
                if pin >= 0 or not engine.stalled or not self._num_working():
                    return engine, routed.ticket
                self._release(routed)
        return self._place_alone(pin), 0

    def _num_working(self) -> int:
        return sum(engine.is_up and not engine.stalled for engine in self._engines)

    def _place_alone(self, pin: int) -> _Engine:
        if pin >= 0:
            engine = self._at(pin)
            if not engine.is_up:
                raise EngineDeadError(f"engine {pin} is not available: {engine.reason}")
            return engine
        up = [engine.index for engine in self._engines if engine.is_up]
        up = [index for index in up if not self._at(index).stalled] or up
        if not up:
            raise EngineDeadError(f"no engine is available: {self._engines[0].reason}")
        return self._at(self._chooser.choose(up))

    def _has(self, engine: int) -> bool:
        return 0 <= engine - self._first < len(self._engines)

    def _at(self, engine: int) -> _Engine:
        return self._engines[engine - self._first]

    async def _route(self, route: Route) -> Routed | None:
        """The coordinator's answer, or None when it is away. A place given too late or to nobody is returned to it."""
        link = self._coordinator
        if link is None or not link.is_up:
            return None
        answer: asyncio.Future[Routed] = asyncio.get_running_loop().create_future()
        self._routes[route.rid] = answer
        if not link.send(route):
            del self._routes[route.rid]
            return None
        try:
            async with asyncio.timeout(ROUTE_TIMEOUT_S):
                return await answer
        except TimeoutError:
            self._release_if_given(answer)
            return None
        except asyncio.CancelledError:
            self._release_if_given(answer)
            raise
        finally:
            del self._routes[route.rid]

    def _release_if_given(self, answer: asyncio.Future[Routed]) -> None:
        if answer.done() and not answer.cancelled() and answer.exception() is None:
            self._release(answer.result())

    async def _is_there(self, engine: _Engine, routed: Routed) -> bool:
        """Waits a moment for the link to the engine's present life; gives the place back when it does not come, or was that in a
        life whose end the coordinator has not seen yet."""
        try:
            async with asyncio.timeout(LINK_WAIT_S):
                while not (engine.is_up and engine.welcome is not None and engine.welcome.epoch >= routed.epoch):
                    if engine.lost_epoch >= routed.epoch:
                        raise TimeoutError
                    await self._wait_change()
        except TimeoutError:
            self._release(routed)
            return False
        except asyncio.CancelledError:
            self._release(routed)
            raise
        return True

    def _release(self, routed: Routed) -> None:
        if routed.engine >= 0 and self._coordinator is not None:
            self._coordinator.send(Released(engine=routed.engine, epoch=routed.epoch, count=1))

    async def _wait_change(self) -> None:
        changed = self._changed
        await changed.wait()

    def _note_change(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # ------------------------------------------------------------ messages

    def _on_coordinator(self, message: Any) -> None:
        if isinstance(message, Routed):
            answer = self._routes.get(message.rid)
            if answer is None or answer.done():
                self._release(message)
            else:
                answer.set_result(message)
        elif isinstance(message, View):
            self.view = message
            self._chooser.on_view(message)
        elif isinstance(message, Left):
            for answer in self._routes.values():
                if not answer.done():
                    answer.set_exception(TimeoutError())
            log.warning("coordinator is away, choosing engines from the last view. reason=%s", message.reason)

    def _on_engine(self, engine: _Engine, message: Any) -> None:
        if isinstance(message, StepOutputs):
            self._on_outputs(engine, message)
        elif isinstance(message, CallReply):
            if (waiting := self._calls.get(message.call_id)) is not None and not waiting[1].done():
                waiting[1].set_result(message)
        elif isinstance(message, Welcome):
            if engine.welcome is not None and engine.welcome.epoch != message.epoch:
                self._lose(engine, "it was restarted")
                self._chooser.forget(engine.index)
            engine.welcome, engine.cause = message, ""
            self._last_facts = message.facts or self._last_facts
            self._note_change()
        elif isinstance(message, EngineDown):
            engine.cause = message.error
            self._lose(engine, message.error)
        elif isinstance(message, Left):
            self._lose(engine, engine.cause or message.reason)
        elif isinstance(message, Refused):
            engine.reason = message.reason

    def _on_outputs(self, engine: _Engine, message: StepOutputs) -> None:
        """The hot path: appends events to the streams concerned and wakes each once."""
        rows = engine.rows
        touched: dict[Stream, None] = {}  # in order
        for rid in message.placed:
            if (row := rows.get(rid)) is not None:
                row.was_placed = True
        for first in message.firsts:
            if (row := rows.get(first.rid)) is not None:
                self._on_first(row, first)
                touched[row.stream] = None
        for entry in message.prompt_logprobs:
            if (row := rows.get(entry.rid)) is not None and (fresh := _unseen(row, entry)) is not None:
                row.stream._pending.append((row.index, PromptLogprobs(fresh)))
                touched[row.stream] = None
        for entry in message.logprobs:
            if (row := rows.get(entry.rid)) is not None:
                row.stream._pending.append((row.index, entry))
        for rid, token in zip(unpack_ids(message.rids).tolist(), unpack(message.tokens).tolist(), strict=True):
            if (row := rows.get(rid)) is not None:
                row.replay.emitted.append(token)
                row.has_gained = True
                row.stream._pending.append((row.index, token))
                touched[row.stream] = None
        for end in message.ends:
            self._finish(engine, end.rid, end)
        if message.returned:
            self._resubmit(engine, message.returned)
        for stream in touched:
            stream._wake()

    def _on_first(self, row: _Row, first: First) -> None:
        """A row's first token on its engine. What the prompt cost is told once, by the first engine."""
        row.was_placed = True
        row.replay.is_suspect = False
        _settle(row)
        if not row.replay.has_first:
            row.replay.has_first = True
            row.stream._pending.append((row.index, first))

    def _finish(self, engine: _Engine, rid: int, end: End) -> None:
        row = engine.rows.pop(rid, None)
        if row is not None:
            self._chooser.ended(engine.index)
            self._end(row, end)

    def _end(self, row: _Row, end: End) -> None:
        """The one way out for a row that was not aborted."""
        _settle(row)
        stream = row.stream
        if stream._rids.pop(row.index, None) is not None:
            stream._num_open -= 1
            stream._pending.append((row.index, end))
            stream._wake()

    def _lose(self, engine: _Engine, reason: str) -> None:
        """The engine is gone: its rows go on elsewhere; nobody else's are touched."""
        if engine.welcome is not None:
            engine.lost_epoch = engine.welcome.epoch
        engine.welcome, engine.reason = None, reason
        text = f"engine {engine.index} died: {reason}"
        rows = list(engine.rows.values())
        engine.rows.clear()
        self._chooser.ended(engine.index, len(rows))
        self._move(rows, text)
        for owner, reply in self._calls.values():
            if owner is engine and not reply.done():
                reply.set_exception(EngineDeadError(text))
        self._note_change()


def _load_fields(load: Load | None) -> dict[str, Any]:
    return {key: getattr(load, key) for key in LOAD_FIELDS} if load is not None else {}


def _settle(row: _Row) -> None:
    """Its trial, if it is on one, is over."""
    if row.trial is not None:
        row.trial.settle()
        row.trial = None


def _unseen(row: _Row, entry: LogprobRow) -> LogprobRow | None:
    """What of prompt log-probabilities no earlier engine has sent."""
    count, replay = len(entry.ranks), row.replay
    skip = min(count, max(0, replay.num_scored - row.num_scored))
    row.num_scored += count
    replay.num_scored = max(replay.num_scored, row.num_scored)
    if skip == 0:
        return entry
    if skip == count:
        return None
    return LogprobRow(entry.rid, entry.token_ids[skip:], entry.logprobs[skip:], entry.ranks[skip:])


def error_from_end(end: End) -> Exception:
    """The exception that an End with reason "error" stands for."""
    known: dict[str, type[RequestError] | type[OverloadedError] | type[EngineError]] = {
        kind.code: kind for kind in (RequestError, OverloadedError, EngineDeadError, QuarantinedError)
    }
    return known.get(end.error_code, EngineError)(end.error or "the engine gave no reason")
