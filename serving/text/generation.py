"""Generation: from a request's engine events to text. Detokenizes, finds stop strings, pairs log-probabilities, counts usage.

Used by the HTTP routes and by the Python API; free of HTTP. One Generation per request, one task reads it.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import AsyncIterator, Sequence

from trireme.params import SamplingParams
from trireme.serving.engines.client import EngineClient, error_from_end
from trireme.serving.engines.replay import Replay
from trireme.serving.engines.stream import Stream
from trireme.serving.text.deltas import Content, Finish, TextDelta, TextLogprob, Usage
from trireme.serving.text.detokenizer import LOOK_BACK, Detokenizer, TokenText
from trireme.transport.wire.messages import End, First, LogprobRow


class _ChoiceState:
    __slots__ = ("cached", "detokenizer", "done", "logprobs", "num_tokens", "replay", "wants_logprobs")

    def __init__(self, replay: Replay, detokenizer: Detokenizer) -> None:
        self.replay = replay
        self.detokenizer = detokenizer
        self.wants_logprobs = replay.params.logprobs >= 0
        self.logprobs: deque[TextLogprob] = deque()
        self.num_tokens = 0
        self.cached = 0
        self.done = False


class Generation:
    """All choices of one request. `async for deltas in generation.deltas()` yields once per wake-up.

    Raises what ended the request early (EngineDeadError, OverloadedError, RequestError, EngineError); the other choices
    are aborted then. Always `close` it.
    """

    def __init__(
        self,
        client: EngineClient,
        table: TokenText,
        replays: Sequence[Replay],
        params: SamplingParams,
        *,
        echoed: bool = False,
    ) -> None:
        """`echoed`: the prompt is shown before the text, so that an unfinished character at its end is not lost."""
        self.params = params
        self.replays = replays
        self.prompt_logprobs: dict[int, list[TextLogprob]] = {}  # by choice; one entry per prompt token but the first
        self.queued_s = 0.0
        self.prefill_s = 0.0
        self.start = time.monotonic()
        self.first: float | None = None
        self.last: float | None = None
        self.num_preemptions = 0
        self.num_taken = 0  # events that `next` has handed out
        self._client = client
        self._stream: Stream | None = None
        self._error: Exception | None = None
        self._choices = [
            _ChoiceState(
                replay,
                Detokenizer(
                    table,
                    stops=params.stop,
                    include_stop=params.include_stop_str_in_output,
                    skip_special=params.skip_special_tokens,
                    hidden_ids=() if params.include_stop_str_in_output else _stop_ids(replay),
                    min_tokens=params.min_tokens,
                    unfinished=table.unfinished(replay.prompt[-LOOK_BACK:].tolist()),
                    echoed=echoed,
                ),
            )
            for replay in replays
        ]

    # ------------------------------------------------------------ reading

    async def submit(self, *, pin: int = -1, label: str = "") -> None:
        """Sends it to an engine. Raises OverloadedError, EngineDeadError, NotFoundError."""
        self._stream = await self._client.submit(self.replays, pin=pin, label=label)

    async def deltas(self) -> AsyncIterator[list[TextDelta]]:
        """Batches of deltas until every choice has ended; a batch may be empty (text withheld, prompt still computed)."""
        while batch := await self.next():
            yield batch[0]

    async def next(self) -> tuple[list[TextDelta]] | None:
        """The next batch, or None when all choices have ended."""
        assert self._stream is not None, "submit first"
        if self._error is not None:
            raise self._error
        events = await self._stream.next()
        self.num_taken += len(events)
        if not events and self._stream.is_done:
            return None
        out: list[TextDelta] = []
        choices = self._choices
        got_token = False
        for index, value in events:
            choice = choices[index]
            if isinstance(value, int):
                if not choice.done:
                    got_token = True
                    self._on_token(index, choice, value, out)
            elif isinstance(value, LogprobRow):
                choice.logprobs.extend(token_logprobs(value))
            elif isinstance(value, First):
                choice.cached = value.num_cached
                self.queued_s = max(self.queued_s, value.queued_s)
                self.prefill_s = max(self.prefill_s, value.prefill_s)
            elif isinstance(value, End):
                self._on_end(index, choice, value, out)
            else:
                self.prompt_logprobs.setdefault(index, []).extend(token_logprobs(value.rows))
        if got_token:
            self.last = time.monotonic()
            if self.first is None:
                self.first = self.last
        if (error := self._failure()) is not None:
            self.close()
            if not out:
                raise error
        return (out,)

    def _failure(self) -> Exception | None:
        return self._error

    def close(self) -> None:
        """Aborts what still runs. Safe to call at any time."""
        if self._stream is not None:
            self._stream.close()

    def nudge(self) -> None:
        """Makes `next` return, with an empty batch if there is nothing else."""
        if self._stream is not None:
            self._stream.nudge()

    @property
    def num_pending(self) -> int:
        """Events not taken yet: how far the reader lags behind."""
        return self._stream.num_pending if self._stream is not None else 0

    @property
    def may_be_refused(self) -> bool:
        """A choice is still queued, with a deadline."""
        return self._stream is not None and bool(self._stream.unplaced) and self.replays[0].deadline_s > 0

    @property
    def is_done(self) -> bool:
        return self._stream is not None and self._stream.is_done

    def usage(self) -> Usage:
        """Counts so far. A prompt counts once, whatever its number of choices; tokens that only ended a choice count too."""
        prompt = cached = 0
        seen = -1
        for choice in self._choices:
            if choice.replay.prompt_index != seen:
                seen = choice.replay.prompt_index
                prompt += len(choice.replay.prompt)
                cached += choice.cached
        return Usage(prompt, sum(choice.num_tokens for choice in self._choices), cached)

    # ------------------------------------------------------------ one event

    def _on_token(self, index: int, choice: _ChoiceState, token: int, out: list[TextDelta]) -> None:
        choice.num_tokens += 1
        detokenizer = choice.detokenizer
        text = detokenizer.push(token)
        logprobs = None
        if choice.wants_logprobs:
            logprobs = [choice.logprobs.popleft()] if choice.logprobs else []
        out.append(Content(index, [token], logprobs, text))
        if detokenizer.stop is not None:
            choice.done = True
            out.append(Finish(index, [], [] if choice.wants_logprobs else None, "stop", detokenizer.stop))
            assert self._stream is not None
            self._stream.abort(index)

    def _on_end(self, index: int, choice: _ChoiceState, end: End, out: list[TextDelta]) -> None:
        if choice.done:
            return
        choice.done = True
        self.num_preemptions += end.num_preemptions
        if end.reason == "error":
            self._error = self._error or error_from_end(end)
            return
        stop = (
            end.stop_token if end.reason == "stop" and end.stop_token in choice.replay.params.stop_token_ids else None
        )
        tail = choice.detokenizer.finish()
        out.append(Finish(index, [], [] if choice.wants_logprobs else None, end.reason, stop, tail))


def token_logprobs(rows: LogprobRow) -> list[TextLogprob]:
    """Columns of a LogprobRow as one entry per position."""
    found = []
    for ids, values, rank in zip(rows.token_ids.tolist(), rows.logprobs.tolist(), rows.ranks.tolist(), strict=True):
        found.append(TextLogprob(ids[0], values[0], rank, list(zip(ids[1:], values[1:], strict=True))))
    return found


def name_by_id(token: int) -> str:
    """The name of a token in log-probabilities under `return_tokens_as_token_ids`: exact where its text is not."""
    return f"token_id:{token}"


def _stop_ids(replay: Replay) -> tuple[int, ...]:
    return replay.params.eos_token_ids + replay.params.stop_token_ids
