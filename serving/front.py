"""Front: everything that the requests of one front end share, how a request is admitted, and whether one would be answered now.

Made by serving/main.py (or a test), used by the API modules in serving/api. Keeps no request.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from typing import Any, ClassVar, Generic, Literal, NamedTuple, Protocol, Self, TypeGuard, TypeVar

from starlette.types import Receive, Scope

from trireme.config import EngineConfig
from trireme.errors import EngineDeadError, ModelNotFoundError, OverloadedError, RequestError
from trireme.serving.admission.admission import Admission, AdmissionFields, Caller
from trireme.serving.admission.occupancy import ChoiceCount
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.engine import EngineState
from trireme.serving.engines.replay import RequestLimits
from trireme.serving.http.bodies import Bodies, IncomingBody, read_body
from trireme.serving.http.sse import Look, Ticker
from trireme.serving.metrics.telemetry import Histogram, Snapshot, Telemetry
from trireme.serving.shared_state import SharedState, alone
from trireme.serving.text.chat_prompt import ChatPromptFields, ChatRenderer, Segments
from trireme.serving.text.detokenizer import TokenText
from trireme.serving.text.json_bounds import SMALL_BYTES
from trireme.serving.text.processor import Processor, ProcessorCache
from trireme.serving.text.templates import find_template
from trireme.serving.text.threads import TextThreads
from trireme.serving.text.tokens import Tokenizer
from trireme.topology.lockstep import is_pause

SPARE_REQUESTS = 64  # requests that may be read and tokenized beyond what the engines can queue
MIN_BODY_BUDGET = 64 << 20  # bytes of bodies that are being read or tokenized, all requests together

Phase = Literal["loading", "ready", "degraded", "paused", "stuck", "down", "draining"]
Result = TypeVar("Result")


class RequestBody(Protocol):
    """The body of a request of some API. Those that set `generates` have the fields of AdmissionFields too."""

    generates: ClassVar[bool]

    @property
    def model(self) -> str | None: ...

    @classmethod
    def parse(cls, body: bytes, *, max_len: int | None = None) -> tuple[Self, list[str]]:
        """The request and the names of fields that were ignored. Raises RequestError naming the field."""
        ...


Body = TypeVar("Body", bound=RequestBody)


def _generates(request: RequestBody) -> TypeGuard[AdmissionFields]:
    return request.generates


class ServedModel(NamedTuple):
    """The one model of this server. `created` is when this front end began, in seconds since the epoch."""

    name: str
    created: int

    def check(self, asked: str | None) -> None:
        """Raises ModelNotFoundError for any other name; None and "" mean this model."""
        if asked and asked != self.name:
            raise ModelNotFoundError(f"there is no model {asked[:100]!r}; this server has {self.name!r}", param="model")


class Readiness(NamedTuple):
    phase: Phase
    engines: list[EngineState]

    @property
    def can_answer(self) -> bool:
        return self.phase in ("ready", "degraded")


class Visit:
    """One request from its head to the last byte of its answer. Counted in `num_inside` from the end of its body on."""

    def __init__(self, front: Front, body: IncomingBody, *, generates: bool) -> None:
        self._front = front
        self.body = body
        self._generates = generates
        self._has_place = False

    def enter(self) -> None:
        """Counts the request as open. Raises OverloadedError, EngineDeadError."""
        self._front.check_capacity(generates=self._generates)
        self.body.is_whole = True
        self._front.num_inside += 1
        self._has_place = True

    def drop_body(self) -> None:
        """Returns the bytes of the body to the budget: it has become tokens."""
        self._front.bodies.end(self.body)

    def leave(self) -> None:
        self.drop_body()
        if self._has_place:
            self._has_place = False
            self._front.num_inside -= 1


class Admitted(Generic[Body]):
    """A request whose body is read, parsed and checked, until the last byte of its answer. `limits` has its priority and timeouts
    if it generates; `headers` are those of its answer."""

    def __init__(
        self,
        front: Front,
        scope: Scope,
        receive: Receive,
        visit: Visit,
        *,
        request: Body,
        caller: Caller,
        limits: RequestLimits,
        headers: list[tuple[bytes, bytes]],
    ) -> None:
        self.front, self.scope, self.receive = front, scope, receive
        self.request = request
        self.caller = caller
        self.limits = limits
        self.headers = headers
        self.num_bytes = visit.body.num_bytes
        self._visit = visit

    async def compute(self, work: Callable[[], Result]) -> Result:
        """Turns the body into what is needed of it (tokens, text), in a thread if it is long, and gives its bytes back."""
        result = await self.front.texts.run(self.num_bytes, work)
        self._visit.drop_body()
        return result


class Front:
    """`snapshots` gives the metrics of all front ends of the deployment (default: only this one's); `shared` is the state that they
    share. `has_been_up`: the deployment was ready before this front end started, so an engine that is down is not loading for the
    first time."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        eos_token_ids: Iterable[int],
        snapshots: Callable[[], Awaitable[list[Snapshot]]] | None = None,
        shared: SharedState | None = None,
        has_been_up: bool = False,
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.model = ServedModel(model_name, int(time.time()))
        self.table = TokenText(tokenizer)
        special = tokenizer.special_names
        template = find_template(
            override=config.model.chat_template,
            own=tokenizer.chat_template,
            special_tokens=tokenizer.special_tokens,
            special_texts=special,
            added_bos=tokenizer.added_bos,
        )
        self.renderer = ChatRenderer(template, special)
        self.telemetry = Telemetry()
        self.shared = shared or alone()
        self.admission = Admission(
            config.serving,
            queue_s=config.scheduler.queue_timeout,
            itl_target=config.scheduler.itl_target,
            shares_prefixes=config.cache.share_prefixes,
            accounts=self.shared.accounts,
            cell=self.shared.occupancy,
        )
        self.ticker = Ticker(buffer_bytes=config.serving.stream_buffer, on_look=self._on_look)
        self.is_draining = False  # told to leave: not ready any more
        self.is_refusing = False  # and the notice period is over
        self.num_inside = 0  # requests between the last byte of their body and their last byte out
        self.choices = ChoiceCount(lambda: client.num_choices, self.shared.occupancy, self.shared.num_fronts)
        self.bodies = Bodies(max(MIN_BODY_BUDGET, 4 * config.serving.body_limit))
        self.progress: dict[str, dict[str, Any]] = {}  # start-up phases of engines, by source
        self._snapshots = snapshots
        self._was_up = has_been_up
        self.texts = TextThreads()
        own_eos = () if tokenizer.eos_token_id is None else (tokenizer.eos_token_id,)
        eos = frozenset((*eos_token_ids, *own_eos))
        self._processors = ProcessorCache(
            lambda max_len, vocab_size: Processor(
                tokenizer,
                max_len=max_len,
                vocab_size=vocab_size,
                eos_token_ids=eos,
                default_max_tokens=config.serving.default_max_tokens,
                queue_timeout_s=config.scheduler.queue_timeout,
            )
        )

    @property
    def processor(self) -> Processor:
        """Checks and completes requests. Raises EngineDeadError while no engine has said yet what it can do."""
        facts = self.client.facts
        if facts is None:
            raise EngineDeadError(self._why_no_facts())
        return self._processors.get(facts.max_len, facts.vocab_size)

    @property
    def chat_ends(self) -> tuple[int, ...]:
        """The token that ends a turn in the chat template, if it is one."""
        return self.tokenizer.ids_of(self.renderer.end_of_turn)

    def _why_no_facts(self) -> str:
        """Why it is not known what the engines can do."""
        return "no engine is up" if self._was_up else "the model is still loading"

    async def chat_segments(self, request: ChatPromptFields, num_bytes: int) -> Segments:
        """The parts of the chat prompt of a request of `num_bytes`. Raises RequestError."""
        return await self.texts.segments(self.renderer, request, num_bytes)

    # ------------------------------------------------------------ admission

    @contextlib.asynccontextmanager
    async def admit(self, scope: Scope, receive: Receive, kind: type[Body]) -> AsyncIterator[Admitted[Body]]:
        """One request from its head to the last byte of its answer: quota, room, body, JSON, model, and for a `kind` that generates
        its priority and timeouts. Raises OverloadedError, EngineDeadError, ModelNotFoundError, RequestError naming the field."""
        caller = self.admission.caller(scope)
        with self.inside(caller, generates=kind.generates) as visit:
            body = await read_body(scope, receive, self.bodies, visit.body, self.config.serving.body_limit)
            visit.enter()
            facts = self.client.facts
            max_len = facts.max_len if facts is not None else None
            request, ignored = await self.texts.run(
                len(body), lambda: kind.parse(body, max_len=max_len), most=SMALL_BYTES
            )
            self.model.check(request.model)
            limits = RequestLimits()
            if _generates(request):
                limits = self.admission.terms(request, caller, scope)
                self.check_room(limits.priority)
            headers = _ignored_header(ignored)
            yield Admitted(self, scope, receive, visit, request=request, caller=caller, limits=limits, headers=headers)

    @contextlib.contextmanager
    def inside(self, caller: Caller, *, generates: bool) -> Iterator[Visit]:
        """One request, refused before its body is read if there is no room. Raises OverloadedError, and EngineDeadError when it
        `generates` and no engine has been up yet."""
        if self.is_refusing:
            raise _shutting_down()
        self.admission.admit(caller)
        self.check_capacity(generates=generates)
        visit = Visit(self, self.bodies.begin(caller.key), generates=generates)
        try:
            yield visit
        finally:
            visit.leave()

    def check_capacity(self, *, generates: bool) -> None:
        """Raises OverloadedError or EngineDeadError when there is no room for one more request."""
        if self.is_refusing:
            raise _shutting_down()
        capacity = self.client.capacity
        if generates and capacity == 0:
            raise EngineDeadError(self._why_no_facts(), hint="see /ready")
        if generates and (under_way := self.choices.in_flight()) >= capacity:
            raise OverloadedError(f"{under_way} choices are running or queued; the limit is {capacity}")
        if self.num_inside >= capacity + SPARE_REQUESTS:
            raise OverloadedError(f"{self.num_inside} requests are open; the limit is {capacity + SPARE_REQUESTS}")

    def refuse(self) -> None:
        """Refuses every request from now on, and those whose body still arrives."""
        self.is_refusing = True
        self.bodies.refuse_all(_shutting_down())

    def check_room(self, priority: int, num_choices: int = 1) -> None:
        """Raises OverloadedError when there is no room for `num_choices` choices of this priority now."""
        facts = [state.facts for state in self.client.states() if state.is_up and state.facts]
        room = self.admission.room(priority, sum(known.max_num_seqs for known in facts), self.client.capacity)
        under_way = self.choices.in_flight()
        if under_way and under_way + num_choices > room:
            urgency = " for requests of this priority" if room < self.client.capacity else ""
            raise OverloadedError(
                f"{under_way} choices are running or queued: no room for {num_choices} more{urgency}; the limit is {room}"
            )

    def admit_choices(self, num_choices: int, num_tokens: int, priority: int) -> None:
        """Raises RequestError for more choices or prompt tokens than engines ever queue, OverloadedError for more than fit now."""
        facts = self.client.facts
        assert facts is not None
        num_up = max(1, sum(state.is_up for state in self.client.states()))
        if num_choices > 1 and num_choices > facts.max_waiting * num_up:
            raise RequestError(
                f"the request makes {num_choices} choices; this server queues at most {facts.max_waiting * num_up}",
                hint="send fewer prompts at once",
            )
        if num_choices > 1 and num_tokens > facts.max_waiting_tokens * num_up:
            raise RequestError(
                f"the request's choices have {num_tokens} prompt tokens together; "
                f"this server queues at most {facts.max_waiting_tokens * num_up}",
                hint="send fewer prompts at once",
            )
        self.check_room(priority, num_choices)

    # ------------------------------------------------------------ state

    def readiness(self) -> Readiness:
        """Whether a request sent now would be answered. Never waits."""
        engines = self.client.states()
        up = [state for state in engines if state.is_up]
        self._was_up = self._was_up or len(up) == len(engines)
        working = [state for state in up if not state.stalled]
        if self.is_draining:
            return Readiness("draining", engines)
        if not self._was_up:
            return Readiness("loading", engines)
        if not up:
            return Readiness("down", engines)
        if not working:
            is_paused = all(is_pause(state.stalled) for state in up)
            return Readiness("paused" if is_paused else "stuck", engines)
        return Readiness("ready" if len(working) == len(engines) else "degraded", engines)

    def own_snapshot(self) -> Snapshot:
        """Metrics of this front end alone, since it started. Called regularly."""
        self.choices.tell()
        counts = self.client.counts()
        gaps = self.client.token_gaps
        return self.telemetry.snapshot(
            {
                "trireme_routing_fallbacks": float(self.client.num_fallbacks),
                "trireme_moves": float(self.client.num_moved),
                "trireme_quarantined": float(self.client.num_quarantined),
                "trireme_frames_malformed|front": float(counts.get("malformed", 0)),
                "trireme_messages_dropped|front": float(counts.get("gaps", 0)),
            },
            {"trireme_inter_token_seconds": Histogram(list(gaps.counts), gaps.total_s)},
        )

    async def snapshots(self) -> list[Snapshot]:
        return await self._snapshots() if self._snapshots is not None else [self.own_snapshot()]

    def _on_look(self, look: Look) -> None:
        self.telemetry.count("trireme_slow_readers" if look == "ended" else "trireme_slow_readers_reset")

    def close(self) -> None:
        self.ticker.stop()
        self.client.close()
        self.texts.close()


def _shutting_down() -> OverloadedError:
    return OverloadedError("this server is shutting down", retry_after_s=5.0)


def _ignored_header(names: list[str]) -> list[tuple[bytes, bytes]]:
    """X-Ignored-Fields with the printable ones of `names`."""
    shown = ", ".join(name[:40] for name in names[:20] if name.isascii() and name.isprintable())
    return [(b"x-ignored-fields", shown.encode())] if names else []
