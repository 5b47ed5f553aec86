"""Front: everything one front end shares between its requests, and whether it can take one now.

Made by serving/main.py (or a test), used by the routes of serving/app.py. Holds no request.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeVar

from trireme.config import EngineConfig
from trireme.errors import EngineDeadError, ModelNotFoundError, OverloadedError, RequestError
from trireme.serving.admission.admission import Admission, Caller
from trireme.serving.api.openai.chat import ChatRenderer, Segments, content_chars
from trireme.serving.api.openai.wire import ChatRequest, TokenizeRequest
from trireme.serving.engines.client import EngineClient
from trireme.serving.engines.engine import EngineState
from trireme.serving.http.sse import Look, Ticker
from trireme.serving.metrics.telemetry import Snapshot, Telemetry
from trireme.serving.template_meter import TemplateSlow
from trireme.serving.text.detokenizer import TokenText
from trireme.serving.text.processor import Processor
from trireme.serving.text.templates import find_template
from trireme.serving.text.tokens import Tokenizer
from trireme.serving.together import Together, alone
from trireme.topology.lockstep import is_pause

SPARE_REQUESTS = 64  # requests that may be read and tokenized beyond what the engines can queue
MIN_BODY_BUDGET = 64 << 20  # bytes of bodies being read at one time, all requests together
OFF_LOOP_CHARS = 8192  # longer texts are tokenized in a thread
ON_LOOP_RENDER_S = 0.01  # what takes a chat template longer is rendered in a thread

Phase = Literal["loading", "ready", "degraded", "paused", "stuck", "down", "draining"]
Result = TypeVar("Result")


class Readiness(NamedTuple):
    phase: Phase
    engines: list[EngineState]

    @property
    def can_answer(self) -> bool:
        return self.phase in ("ready", "degraded")


class Front:
    """`snapshots` gives the numbers of all front ends of the deployment (default: only this one's); `shared` is what they have in
    common."""

    def __init__(
        self,
        config: EngineConfig,
        client: EngineClient,
        tokenizer: Tokenizer,
        *,
        model_name: str,
        eos_token_ids: Iterable[int],
        snapshots: Callable[[], Awaitable[list[Snapshot]]] | None = None,
        shared: Together | None = None,
    ) -> None:
        self.config = config
        self.client = client
        self.tokenizer = tokenizer
        self.model_name = model_name
        self.created = int(time.time())
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
        self.chat_ends = tokenizer.ids_of(self.renderer.end_of_turn)
        self.telemetry = Telemetry()
        self.shared = shared or alone()
        self.admission = Admission(
            config.serving,
            queue_s=config.scheduler.queue_timeout,
            shares_prefixes=config.cache.share_prefixes,
            accounts=self.shared.accounts,
            cell=self.shared.occupancy,
        )
        self.ticker = Ticker(buffer_bytes=config.serving.stream_buffer, on_look=self._on_look)
        self.is_draining = False  # told to leave: not ready any more
        self.is_refusing = False  # and the notice period is over
        self.num_inside = 0  # requests between the first byte of their body and their last byte out
        self.num_coming = 0  # choices that are admitted and on their way to an engine
        self.body_bytes = 0  # of bodies being read
        self._body_budget = max(MIN_BODY_BUDGET, 4 * config.serving.body_limit)
        self.progress: dict[str, dict[str, Any]] = {}  # start-up phases of engines, by source
        self._snapshots = snapshots
        self._eos_token_ids = frozenset(eos_token_ids) | {
            token for token in (tokenizer.eos_token_id,) if token is not None
        }
        self._was_up = False
        self._processor: Processor | None = None
        self._is_template_slow = False  # it has once taken longer than other streams should wait
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="text")

    @property
    def processor(self) -> Processor:
        """Checks and completes requests. Raises EngineDeadError while no engine has said yet what it can do."""
        facts = self.client.facts
        if facts is None:
            raise EngineDeadError("the model is still loading")
        known = self._processor
        if known is None or (known.max_len, known.vocab_size) != (facts.max_len, facts.vocab_size):
            known = self._processor = Processor(
                self.tokenizer,
                max_len=facts.max_len,
                vocab_size=facts.vocab_size,
                eos_token_ids=self._eos_token_ids,
                default_max_tokens=self.config.serving.default_max_tokens,
                queue_timeout_s=self.config.scheduler.queue_timeout,
            )
        return known

    async def off_loop(self, num_chars: int, work: Callable[[], Result]) -> Result:
        """Runs text work here if it is short, else in a thread, so that a long prompt does not delay other streams."""
        if num_chars <= OFF_LOOP_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)

    async def chat_segments(self, request: ChatRequest | TokenizeRequest) -> Segments:
        """The parts of a chat's prompt, rendered here if the messages are short and the template quick, else in a thread.
        Raises RequestError."""
        num_chars = sum(map(content_chars, request.messages or ()))
        if num_chars <= OFF_LOOP_CHARS and not self._is_template_slow:
            try:
                return self.renderer.segments(request, limit_s=ON_LOOP_RENDER_S)
            except TemplateSlow:
                self._is_template_slow = True
        return await asyncio.get_running_loop().run_in_executor(self._threads, self.renderer.segments, request)

    # ------------------------------------------------------------ admission

    @contextlib.contextmanager
    def inside(self, caller: Caller, *, generates: bool) -> Iterator[None]:
        """Holds a place for one request, refusing it before anything of its body is read. Raises OverloadedError, and
        EngineDeadError when it `generates` and no engine has been up yet."""
        if self.is_refusing:
            raise OverloadedError("this server is shutting down", retry_after_s=5.0)
        self.admission.admit(caller)
        capacity = self.client.capacity
        if generates and capacity == 0:
            raise EngineDeadError("the model is still loading", hint="see /ready")
        if generates and (under_way := self.num_under_way()) >= capacity:
            raise OverloadedError(f"{under_way} choices are running or queued; the limit is {capacity}")
        if self.num_inside >= capacity + SPARE_REQUESTS:
            raise OverloadedError(f"{self.num_inside} requests are open; the limit is {capacity + SPARE_REQUESTS}")
        self.num_inside += 1
        try:
            yield
        finally:
            self.num_inside -= 1

    def num_under_way(self) -> int:
        """Choices on engines, or on their way there, of all front ends that share these engines."""
        return self.tell_rows() + self.shared.occupancy.others(self.shared.num_fronts)

    def tell_rows(self) -> int:
        """Tells the other front ends how many choices are under way here, and returns it."""
        own = self.client.num_rows + self.num_coming
        self.shared.occupancy.tell(own)
        return own

    @contextlib.contextmanager
    def coming(self, num_rows: int) -> Iterator[None]:
        """Around the submit of choices that were admitted, so that they are counted until they are on an engine."""
        self.num_coming += num_rows
        self.tell_rows()
        try:
            yield
        finally:
            self.num_coming -= num_rows
            self.tell_rows()

    def take_body_bytes(self, num_bytes: int) -> None:
        """Counts bytes of a body being read (negative: done with them). Raises OverloadedError over the budget."""
        if num_bytes > 0 and self.body_bytes + num_bytes > self._body_budget:
            raise OverloadedError(f"more than {self._body_budget} bytes of requests are being read")
        self.body_bytes += num_bytes

    def check_room(self, priority: int, num_rows: int = 1) -> None:
        """Refuses what its priority gives no room to just now. Raises OverloadedError."""
        facts = [state.facts for state in self.client.states() if state.is_up and state.facts]
        room = self.admission.room(priority, sum(known.max_num_seqs for known in facts), self.client.capacity)
        under_way = self.num_under_way()
        if under_way and under_way + num_rows > room:
            urgency = " for requests of this priority" if room < self.client.capacity else ""
            raise OverloadedError(
                f"{under_way} choices are running or queued: no room for {num_rows} more{urgency}; the limit is {room}"
            )

    def admit_rows(self, num_rows: int, num_tokens: int, priority: int) -> None:
        """Refuses what could never be queued at once, and what does not fit just now."""
        facts = self.client.facts
        assert facts is not None
        num_up = max(1, sum(state.is_up for state in self.client.states()))
        if num_rows > 1 and num_rows > facts.max_waiting * num_up:
            raise RequestError(
                f"the request makes {num_rows} choices; this server queues at most {facts.max_waiting * num_up}",
                hint="send fewer prompts at once",
            )
        if num_rows > 1 and num_tokens > facts.max_waiting_tokens * num_up:
            raise RequestError(
                f"the request's choices have {num_tokens} prompt tokens together; "
                f"this server queues at most {facts.max_waiting_tokens * num_up}",
                hint="send fewer prompts at once",
            )
        self.check_room(priority, num_rows)

    def check_model(self, name: str | None) -> None:
        if name and name != self.model_name:
            raise ModelNotFoundError(
                f"there is no model {name[:100]!r}; this server has {self.model_name!r}", param="model"
            )

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
        """Numbers of this life of this front end alone. Asked for often, also when nothing happens."""
        self.tell_rows()
        counts = self.client.counts()
        return self.telemetry.snapshot(
            {
                "trireme_routing_fallbacks": float(self.client.num_fallbacks),
                "trireme_moves": float(self.client.num_moved),
                "trireme_quarantined": float(self.client.num_quarantined),
                "trireme_frames_malformed|front": float(counts.get("malformed", 0)),
                "trireme_messages_dropped|front": float(counts.get("gaps", 0)),
            }
        )

    async def snapshots(self) -> list[Snapshot]:
        return await self._snapshots() if self._snapshots is not None else [self.own_snapshot()]

    def _on_look(self, look: Look) -> None:
        self.telemetry.count("trireme_slow_readers" if look == "ended" else "trireme_slow_readers_reset")

    def close(self) -> None:
        self.ticker.stop()
        self.client.close()
        self._threads.shutdown(wait=False, cancel_futures=True)
