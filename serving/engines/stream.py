"""One request as its reader sees it: the events of its choices, and what is known of each choice's way over the engines.

Filled by serving/engines/client.py on its loop; read by serving/text/generation.py.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

from trireme.errors import TriremeError
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.resubmit import Probe
from trireme.serving.engines.token_gaps import NO_TOKEN_S
from trireme.transport.wire.messages import End, First, LogprobRow


class PromptLogprobs(NamedTuple):
    """Log-probabilities of a part of the prompt."""

    rows: LogprobRow


Event: TypeAlias = tuple[int, int | First | LogprobRow | PromptLogprobs | End]
"""(index of the choice in its request, a token id or what else the engine says of it). Log-probabilities come before the
tokens they belong to, End comes last."""


class StreamChoice:
    """One choice of a stream, over all its moves. `rid` is that of its last submit."""

    __slots__ = (
        "has_gained",
        "index",
        "label",
        "last_token_s",
        "num_scored",
        "pin",
        "replay",
        "rid",
        "since",
        "stream",
        "probe",
        "wait_until",
        "was_placed",
    )

    def __init__(
        self, stream: Stream, index: int, replay: Replay, rid: int, label: str, since: float, wait_until: float
    ) -> None:
        self.stream = stream
        self.index = index
        self.replay = replay
        self.rid = rid
        self.was_placed = False  # has run on its engine
        self.has_gained = False  # a token there
        self.num_scored = 0  # prompt positions whose log-probabilities came from there
        self.last_token_s = NO_TOKEN_S  # when its last token came, from whichever engine
        self.probe: Probe | None = None
        self.pin = -1
        self.label = label
        self.since = since  # when it first wanted an engine
        self.wait_until = wait_until  # while it has no engine

    def settle(self) -> None:
        """Its probe, if it is on one, is over."""
        if self.probe is not None:
            self.probe.settle()
            self.probe = None

    def unseen(self, entry: LogprobRow) -> LogprobRow | None:
        """What of prompt log-probabilities no earlier engine has sent."""
        count, replay = len(entry.ranks), self.replay
        skip = min(count, max(0, replay.num_scored - self.num_scored))
        self.num_scored += count
        replay.num_scored = max(replay.num_scored, self.num_scored)
        if skip == 0:
            return entry
        if skip == count:
            return None
        return LogprobRow(entry.rid, entry.token_ids[skip:], entry.logprobs[skip:], entry.ranks[skip:])

    def started_over(self, wait_until: float) -> None:
        """It has lost its engine, and may be without one for so long."""
        self.was_placed = self.has_gained = False
        self.num_scored = 0
        self.wait_until = wait_until
        self.settle()


class Stream:
    """Events of one request's choices. Iterate with `next`; always `close` it (twice is fine). `abort` is told the rids that nobody
    wants any more; `began` is when it was asked for."""

    __slots__ = ("_abort", "_timer", "_waiter", "began", "num_open", "pending", "replays", "rids", "unplaced")

    def __init__(self, replays: Sequence[Replay], abort: Callable[[Sequence[int]], None], began: float) -> None:
        self.replays = replays
        self.began = began
        self._abort = abort
        self.pending: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self.rids: dict[int, int] = {}  # choice index -> rid, while it runs
        self.num_open = len(replays)
        self.unplaced = set(
            range(len(replays))
        )  # choices that have never been in the batch of an engine, and may be refused

    @property
    def is_done(self) -> bool:
        """True when every choice has ended and every event was taken."""
        return self.num_open == 0 and not self.pending

    @property
    def num_pending(self) -> int:
        """Events that arrived and were not taken yet: grows when the reader is slow."""
        return len(self.pending)

    async def next(self) -> list[Event]:
        """All events since the last call; an empty list when everything has ended, or after `nudge`."""
        if not self.pending:
            if self.num_open == 0:
                return []
            waiter = self._waiter = asyncio.get_running_loop().create_future()
            try:
                await waiter
            finally:
                if self._waiter is waiter:
                    self._waiter = None
        events, self.pending = self.pending, []
        return events

    def abort(self, index: int) -> None:
        """Ends one choice early (a stop string was found). No further event of it follows."""
        rid = self.rids.pop(index, None)
        if rid is not None:
            self.num_open -= 1
            self._abort([rid])
            self.nudge()

    def fail_after(self, seconds: float, error: TriremeError) -> None:
        """Whatever still runs then is aborted, and ends with this error."""
        self._timer = asyncio.get_running_loop().call_later(seconds, self._fail, error)

    def _fail(self, error: TriremeError) -> None:
        rids, self.rids = self.rids, {}
        self.num_open -= len(rids)
        self._abort(list(rids.values()))
        self.pending += [
            (index, End(rid, "error", error=error.message, error_code=error.code)) for index, rid in rids.items()
        ]
        self.nudge()

    def close(self) -> None:
        """Aborts whatever still runs, and drops what was not taken."""
        self.pending.clear()
        if self._timer is not None:
            self._timer.cancel()
        rids = list(self.rids.values())
        self.rids.clear()
        self.num_open = 0
        if rids:
            self._abort(rids)
        self.nudge()

    def nudge(self) -> None:
        """Makes a waiting `next` return."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
