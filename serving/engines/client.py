"""EngineClient: submits choices to engines, sends them on when one is lost, and turns engine messages into events per request.

Owned by a frontend process or by the Python API; free of HTTP and of text. Lives on one asyncio loop and needs no locks.
An engine's death concerns its own choices only, and these go on elsewhere (serving/engines/migration.py; where to:
serving/engines/placement.py). A request's task is woken at most once per engine message, however many choices it has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec

from trireme.errors import (
    ContextLengthError,
    DeadlineError,
    EngineDeadError,
    EngineError,
    NotFoundError,
    OverloadedError,
    QuarantinedError,
    RequestError,
    TargetsMissedError,
    TriremeError,
)
from trireme.hashing import prompt_keys
from trireme.metrics import BY_NAME
from trireme.serving.engines.engine import Connect, EngineLink, EngineState
from trireme.serving.engines.migration import judge
from trireme.serving.engines.pauses import Pauses
from trireme.serving.engines.placement import Placement
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.resubmit import Resubmissions
from trireme.serving.engines.stream import PromptLogprobs, Stream, StreamChoice
from trireme.serving.engines.token_gaps import TokenGaps
from trireme.topology.lockstep import Mode
from trireme.transport.sockets.names import Disconnected
from trireme.transport.wire.columns import unpack, unpack_ids
from trireme.transport.wire.messages import (
    MAX_PREFIX,
    Abort,
    Call,
    CallReply,
    End,
    EngineDown,
    EngineFacts,
    First,
    Load,
    Refused,
    Route,
    Routed,
    StepOutputs,
    Welcome,
)

log = logging.getLogger(__name__)

DOUBTFUL = "this frontend could not take in what the engine said, and may be out of memory"
RESEND_S = 0.05  # after an engine took no message
MIGRATION_LIMIT = 2  # most moves of one choice
ENGINE_WAIT_S = 60.0  # for an engine to come up
GRACE_S = 0.5  # after its deadline a request may wait for what its engine says of it
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
        in_lockstep: bool = False,
        label: str = "",
        tells_prefix: bool = False,
        first_engine: int = 0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Choices of an engine that dies move at most `migration_limit` times. While no engine is up, requests wait for one for at
        most `engine_wait_s`. Engines `in_lockstep` die together: with the first, all are lost. `label` is the place of this front
        end: the coordinator prefers engines with the same one. With `tells_prefix` it learns what prompts begin with.
        `first_engine` is the number of the first of `engines`, where these are not all that there are."""
        self._clock = clock
        self._label = label
        self._tells_prefix = tells_prefix
        self._connects = tuple(engines)
        self._connect_coordinator = coordinator
        self._engines = [EngineLink(first_engine + i) for i in range(len(engines))]
        if in_lockstep:
            for engine in self._engines:
                engine.lockstep_peers = self._engines
        self._rids = itertools.count(1)
        self._placement = Placement(self._engines, self._rids, clock, is_coordinated=coordinator is not None, rng=rng)
        self._calls: dict[int, tuple[EngineLink, asyncio.Future[CallReply]]] = {}
        self._pauses = Pauses(
            self,
            self._placement,
            self._rids,
            in_lockstep=in_lockstep,
            absence_s=engine_wait_s,
            clock=clock,
        )
        self.num_moved = self.num_quarantined = 0
        self.token_gaps = TokenGaps(BY_NAME["trireme_inter_token_seconds"].buckets)
        self._migration_limit = migration_limit
        self._engine_wait_s = engine_wait_s
        self._resubmissions: Resubmissions[StreamChoice] = Resubmissions(self._place_again)

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Opens all links; returns at once. Call inside the loop."""
        for engine, connect in zip(self._engines, self._connects, strict=True):
            engine.link = connect(lambda message, engine=engine: self._on_engine(engine, message))  # type: ignore[misc]
        if self._connect_coordinator is not None:
            self._placement.coordinator = self._connect_coordinator(self._on_coordinator)

    def close(self) -> None:
        """Ends every choice and closes the links."""
        self._migration_limit = 0
        self._resubmissions.close()
        self._fail_moving("the frontend is closing", EngineDeadError.code)
        for engine in self._engines:
            self._lose(engine, "the frontend is closing")
            if engine.link is not None:
                engine.link.close()
        if self._placement.coordinator is not None:
            self._placement.coordinator.close()

    def end_all(self, reason: str) -> None:
        """Ends every choice with an explicit error, and tells the engines. What waits for an engine, or will, ends likewise."""
        self._placement.give_up(reason)
        self._fail_moving(reason, OverloadedError.code)
        for engine in self._engines:
            rids = list(engine.choices)
            for rid in rids:
                self._finish(engine, rid, End(rid=rid, reason="error", error=reason, error_code=OverloadedError.code))
            if rids and engine.link is not None:
                engine.link.send(Abort(rids=rids))

    async def wait_up(self, timeout_s: float | None = None) -> None:
        """Returns when every engine is connected. Raises TimeoutError."""
        async with asyncio.timeout(timeout_s):
            while not all(engine.is_up for engine in self._engines):
                await self._placement.wait_change()

    # ------------------------------------------------------------ state

    @property
    def facts(self) -> EngineFacts | None:
        """Facts of any engine that is up: they are alike. After all went down, those of the last one."""
        known = [engine.welcome.facts for engine in self._engines if engine.welcome and engine.welcome.facts]
        return known[0] if known else self._last_facts

    _last_facts: EngineFacts | None = None

    @property
    def num_choices(self) -> int:
        """Choices on engines, and between two of them."""
        return sum(len(engine.choices) for engine in self._engines) + len(self._resubmissions)

    @property
    def capacity(self) -> int:
        """Choices that the engines now up can run and queue, all frontends together; while none is up, as if one were."""
        up = [engine.welcome.facts for engine in self._engines if engine.is_up and engine.welcome]
        if not up:
            up = [self._last_facts]
        return sum(facts.max_num_seqs + facts.max_waiting for facts in up if facts)

    async def loads(self, timeout_s: float = 1.0) -> dict[int, dict[str, Any]]:
        """What the engines of this frontend have to do, by engine: as the coordinator knows it, or by asking them."""
        if (
            self._placement.view is not None
            and self._placement.coordinator is not None
            and self._placement.coordinator.is_up
        ):
            members = [member for member in self._placement.view.members if self._placement.has(member.engine)]
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
        for link in (*(engine.link for engine in self._engines), self._placement.coordinator):
            for key, value in (link.counts() if link is not None else {}).items():
                total[key] = total.get(key, 0) + value
        return total

    def states(self) -> list[EngineState]:
        """How each engine stands now."""
        return [engine.state for engine in self._engines]

    @property
    def num_fallbacks(self) -> int:
        """Choices of an engine made without the coordinator."""
        return self._placement.num_fallbacks

    async def call(self, engine: int, method: str, timeout_s: float = 5.0, **args: Any) -> Any:
        """Asks one engine (`stats`, ...). Raises EngineDeadError when it is away, EngineError when it refuses."""
        target = self._placement.at(engine)
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

    async def direct(self, mode: Mode, timeout_s: float) -> None:
        """Pauses every engine, or with "" lets all go on; returns when that is so. See Pauses.direct."""
        await self._pauses.direct(mode, timeout_s)

    # ------------------------------------------------------------ requests

    async def submit(self, replays: Sequence[Replay], *, pin: int = -1, label: str = "") -> Stream:
        """Sends all choices of a request; choices of one prompt (adjacent, same `prompt_index`) go to the same engine.

        `pin` >= 0 demands that engine; `label` asks for one near another place than ours. While no engine is up it waits. Raises
        OverloadedError, EngineDeadError, NotFoundError (no such engine), DeadlineError (its own time is up).
        """
        if pin >= 0 and not self._placement.has(pin):
            raise NotFoundError(
                f"there is no engine {pin} here, but {self._engines[0].index}..{self._engines[-1].index}",
                param="x-data-parallel-rank",
            )
        stream = Stream(replays, self._abort, self._clock())
        total_s = replays[0].total_s
        late = DeadlineError(f"not complete after {total_s:g} s, its deadline")
        if total_s:
            stream.fail_after(total_s + GRACE_S, late)
        try:
            async with asyncio.timeout(total_s or None):
                await self._send_all(stream, pin, label or self._label)
        except TimeoutError:
            stream.close()
            raise late from None
        except BaseException:
            stream.close()
            raise
        return stream

    async def _send_all(self, stream: Stream, pin: int, label: str) -> None:
        index = 0
        for _, group in itertools.groupby(stream.replays, key=lambda replay: replay.prompt_index):
            replays = list(group)
            since, until = self._clock(), self._wait_until(replays[0])
            route = self._route_for(replays[0], len(replays), pin, label)
            engine, ticket = await self._placement.place(route, until)
            for replay in replays:
                replay.stays = pin >= 0
                self._send(
                    StreamChoice(stream, index, replay, next(self._rids), route.label, since, until), engine, ticket
                )
                index += 1

    def _send(self, choice: StreamChoice, engine: EngineLink, ticket: int) -> None:
        engine.choices[choice.rid] = choice
        self._placement.fallback_router.started(engine.index)
        choice.stream.rids[choice.index] = choice.rid
        now = self._clock()
        submit = choice.replay.submit(
            choice.rid, ticket, passed_s=now - choice.stream.began, waited_s=now - choice.since
        )
        if engine.link is None or not engine.link.send(submit):
            del engine.choices[choice.rid]
            self._placement.fallback_router.ended(engine.index)
            self._on_unsent(choice, f"engine {engine.index} takes no more messages" if engine.is_up else engine.reason)

    def _on_unsent(self, choice: StreamChoice, why: str) -> None:
        """The engine's queue is full, or its link is about to be down: once more, soon."""
        if self._clock() + RESEND_S < choice.wait_until:
            self._resubmissions.start([choice], [], RESEND_S)
        else:
            self._end(choice, End(choice.rid, "error", error=why, error_code=EngineDeadError.code))

    def _abort(self, rids: Iterable[int]) -> None:
        self._resubmissions.drop(rids)
        for engine in self._engines:
            mine = [rid for rid in rids if rid in engine.choices]
            for rid in mine:
                engine.choices.pop(rid).settle()
            if mine:
                self._placement.fallback_router.ended(engine.index, len(mine))
                if engine.link is not None:
                    engine.link.send(Abort(rids=mine))

    # ------------------------------------------------------------ moves

    def _resubmit(self, source: EngineLink, returned: Iterable[tuple[int, int, float]]) -> None:
        """Choices that an engine has given back, without an end and without having run them, go on elsewhere (at the engine it
        names, if that is up). What they have waited counts against their deadlines."""
        choices = []
        for rid, to, waited_s in returned:
            if (choice := source.choices.pop(rid, None)) is not None:
                choice.pin = to if self._placement.has(to) else -1
                choice.replay.has_waited(waited_s)
                choices.append(choice)
        self._placement.fallback_router.ended(source.index, len(choices))
        self._send_on(choices, [])

    def _move(self, choices: Sequence[StreamChoice], cause: str, *, is_death: bool) -> None:
        """These choices have lost their engine: they go on elsewhere, or end with an error that says why not."""
        verdict = judge(choices, self._migration_limit, is_death=is_death)
        for choice in verdict.poison:
            self.num_quarantined += 1
            text = f"two engines died while they ran this request, the last one of this: {cause}; it is not tried again"
            self._end(choice, End(choice.rid, "error", error=text, error_code=QuarantinedError.code))
        for choice in verdict.exhausted:
            moves = f" after {choice.replay.num_moves - 1} resubmissions" if choice.replay.num_moves > 1 else ""
            self._end(choice, End(choice.rid, "error", error=cause + moves, error_code=EngineDeadError.code))
        for choice in choices:
            choice.pin = -1
        self._send_on(verdict.free, verdict.probes)

    def _send_on(self, free: Sequence[StreamChoice], probes: Sequence[Sequence[StreamChoice]]) -> None:
        for choice in (*free, *itertools.chain.from_iterable(probes)):
            self.num_moved += 1
            choice.started_over(self._wait_until(choice.replay))
        self._resubmissions.start(free, probes)

    async def _place_again(self, choice: StreamChoice) -> None:
        """Sends a choice that has no engine to one. Never raises for want of an engine: the choice ends then."""
        try:
            engine, ticket = await self._place_soon(choice)
        except TriremeError as error:
            if self._resubmissions.take(choice):
                self._end(choice, End(choice.rid, "error", error=error.message, error_code=error.code))
            return
        if not self._resubmissions.take(choice):  # it was aborted meanwhile
            if ticket and engine.welcome is not None:
                self._placement.release(Routed(choice.rid, engine.index, engine.welcome.epoch, ticket))
            return
        choice.rid = next(self._rids)
        self._send(choice, engine, ticket)

    async def _place_soon(self, choice: StreamChoice) -> tuple[EngineLink, int]:
        """At the engine that it is meant for, if it is there at once; else as any other."""
        route = self._route_for(choice.replay, 1, choice.pin, choice.label)
        if route.pin >= 0:
            with contextlib.suppress(EngineDeadError):
                return await self._placement.place_once(route)
            route = msgspec.structs.replace(route, pin=-1)
        return await self._placement.place(route, choice.wait_until)

    def _fail_moving(self, reason: str, code: str) -> None:
        for choice in self._resubmissions.take_all():
            self._end(choice, End(choice.rid, "error", error=reason, error_code=code))

    def _wait_until(self, replay: Replay) -> float:
        """How long a choice may be without an engine."""
        wait_s = self._engine_wait_s
        if replay.deadline_s > 0:
            wait_s = min(wait_s, replay.deadline_s)
        return self._clock() + wait_s

    def _route_for(self, replay: Replay, num_choices: int, pin: int, label: str) -> Route:
        facts, keys = self.facts, b""
        if facts is not None and self._tells_prefix:
            keys = prompt_keys(replay.prompt, facts.block_size, salt=replay.salt, most=MAX_PREFIX)
        return Route(0, replay.num_tokens, num_choices, pin, label, keys)

    # ------------------------------------------------------------ messages

    def _on_coordinator(self, message: Any) -> None:
        self._placement.on_message(message)
        self._pauses.on_message(message)

    def _on_engine(self, engine: EngineLink, message: Any) -> None:
        if isinstance(message, StepOutputs):
            if engine.has_missed:
                self._end_doubtful(engine)
            engine.has_missed = True  # should the next line raise: some choices have what it says then, and some do not
            try:
                self._on_outputs(engine, message)
            except Exception:
                self._end_doubtful(engine)
                raise
            engine.has_missed = False
        elif isinstance(message, CallReply):
            if (waiting := self._calls.get(message.call_id)) is not None and not waiting[1].done():
                waiting[1].set_result(message)
        elif isinstance(message, Welcome):
            if engine.welcome is not None and engine.welcome.epoch != message.epoch:
                self._lose(engine, "it was restarted")
                self._placement.fallback_router.forget(engine.index)
            engine.welcome, engine.cause = message, ""
            self._last_facts = message.facts or self._last_facts
            self._placement.note_change()
        elif isinstance(message, EngineDown):
            engine.cause = message.error
            self._lose(engine, message.error)
        elif isinstance(message, Disconnected):
            self._lose(engine, engine.cause or message.reason, is_death=bool(engine.cause) or not message.is_torn)
        elif isinstance(message, Refused):
            engine.reason = message.reason

    def _end_doubtful(self, engine: EngineLink) -> None:
        """What an engine said was not taken in to the end, as for want of memory: its choices end with an error, since they would
        go on without tokens. May be tried again, should there be no memory for this either."""
        rids = list(engine.choices)
        log.error(
            "could not take in what an engine said, so its choices end engine=%d choices=%d", engine.index, len(rids)
        )
        for rid in rids:
            self._end(engine.choices[rid], End(rid, "error", error=DOUBTFUL, error_code=EngineError.code))
            del engine.choices[rid]
        self._placement.fallback_router.ended(engine.index, len(rids))
        if rids and engine.link is not None:
            engine.link.send(Abort(rids=rids))
        engine.has_missed = False

    def _on_outputs(self, engine: EngineLink, message: StepOutputs) -> None:
        """The hot path: appends events to the streams concerned and wakes each once."""
        choices = engine.choices
        touched: dict[Stream, None] = {}  # in order
        for rid in message.placed:
            if (choice := choices.get(rid)) is not None:
                choice.was_placed = True
                choice.stream.unplaced.discard(choice.index)
        for first in message.firsts:
            if (choice := choices.get(first.rid)) is not None:
                self._on_first(choice, first)
                touched[choice.stream] = None
        for entry in message.prompt_logprobs:
            if (choice := choices.get(entry.rid)) is not None and (fresh := choice.unseen(entry)) is not None:
                choice.stream.pending.append((choice.index, PromptLogprobs(fresh)))
                touched[choice.stream] = None
        for entry in message.logprobs:
            if (choice := choices.get(entry.rid)) is not None:
                choice.stream.pending.append((choice.index, entry))
        now_s = self._clock()
        num_by_last_s: dict[
            float, int
        ] = {}  # tokens, by when the one before came; mostly the same for all choices of a step
        for rid, token in zip(unpack_ids(message.rids).tolist(), unpack(message.tokens).tolist(), strict=True):
            if (choice := choices.get(rid)) is not None:
                choice.replay.emitted.append(token)
                choice.has_gained = True
                last_s = choice.last_token_s
                num_by_last_s[last_s] = num_by_last_s.get(last_s, 0) + 1
                choice.last_token_s = now_s
                choice.stream.pending.append((choice.index, token))
                touched[choice.stream] = None
        self.token_gaps.add(now_s, num_by_last_s)
        for end in message.ends:
            self._finish(engine, end.rid, end)
        if message.returned:
            self._resubmit(engine, message.returned)
        for stream in touched:
            stream.nudge()

    def _on_first(self, choice: StreamChoice, first: First) -> None:
        """A choice's first token on its engine. What the prompt cost is told once, by the first engine."""
        choice.was_placed = True
        choice.stream.unplaced.discard(choice.index)
        choice.replay.is_suspect = False
        choice.settle()
        if not choice.replay.has_first:
            choice.replay.has_first = True
            choice.stream.pending.append((choice.index, first))

    def _finish(self, engine: EngineLink, rid: int, end: End) -> None:
        choice = engine.choices.pop(rid, None)
        if choice is not None:
            self._placement.fallback_router.ended(engine.index)
            self._end(choice, end)

    def _end(self, choice: StreamChoice, end: End) -> None:
        """The one way out for a choice that was not aborted."""
        choice.settle()
        stream = choice.stream
        stream.unplaced.discard(choice.index)
        if choice.index in stream.rids:
            stream.pending.append((choice.index, end))
            del stream.rids[choice.index]
            stream.num_open -= 1
            stream.nudge()

    def _lose(self, engine: EngineLink, reason: str, *, is_death: bool = True) -> None:
        """The engine is gone, or the connection to it: its choices go on elsewhere; nobody else's are touched, unless others step
        together with it and so ended with it."""
        text = f"engine {engine.index} {'died' if is_death else 'was lost'}: {reason}"
        choices: list[StreamChoice] = []
        for lost in engine.lost_with() if is_death else [engine]:
            choices += lost.choices.values()
            if lost is not engine and lost.choices and lost.link is not None:
                lost.link.send(Abort(rids=list(lost.choices)))  # should only the link to the first be broken
            self._placement.fallback_router.ended(lost.index, len(lost.choices))
            lost.choices.clear()
            if lost.welcome is not None:
                lost.lost_epoch = lost.welcome.epoch
        engine.welcome, engine.reason = None, reason
        self._move(choices, text, is_death=is_death)
        for owner, reply in self._calls.values():
            if owner is engine and not reply.done():
                reply.set_exception(EngineDeadError(text))
        self._placement.note_change()


def _load_fields(load: Load | None) -> dict[str, Any]:
    return {key: getattr(load, key) for key in LOAD_FIELDS} if load is not None else {}


def error_from_end(end: End) -> Exception:
    """The exception that an End with reason "error" stands for."""
    known: dict[str, type[RequestError | OverloadedError | DeadlineError | EngineError]] = {
        kind.code: kind
        for kind in (
            RequestError,
            ContextLengthError,
            OverloadedError,
            TargetsMissedError,
            DeadlineError,
            EngineDeadError,
            QuarantinedError,
        )
    }
    reason = end.error or "the engine gave no reason"
    kind = known.get(end.error_code, EngineError)
    if issubclass(kind, OverloadedError) and end.retry_after_s > 0:
        return kind(reason, retry_after_s=end.retry_after_s)
    return kind(reason)
