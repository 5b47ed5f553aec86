"""Step outputs gathered per frontend: one StepOutputs each, however many events happened in between.

Called by core. Applies the stop rules; knows nothing of blocks or sockets.
"""

from __future__ import annotations

from trireme.engine_core.scheduling.decode_batch import DecodeBatch, Ints
from trireme.engine_core.scheduling.request import Request
from trireme.transport.wire.columns import Column, Ids, pack, pack_ids
from trireme.transport.wire.messages import End, EndReason, First, LogprobRow, StepOutputs


def end_reason(request: Request, token: int) -> EndReason | None:
    """Why the sequence ends with `token`, its newest token; None if it goes on."""
    if token in request.stops and request.num_output > request.params.min_tokens:
        return "stop"
    return "length" if request.num_tokens >= request.limit else None


class FrontOutputs:
    """One StepOutputs under construction."""

    __slots__ = (
        "_new_rids",
        "_new_tokens",
        "_rids",
        "_tokens",
        "ends",
        "firsts",
        "logprobs",
        "placed",
        "prompt_logprobs",
        "returned",
    )

    def __init__(self) -> None:
        self._rids: list[Ids] = []
        self._tokens: list[Column] = []
        self._new_rids: list[int] = []  # of single sequences added since the last whole column
        self._new_tokens: list[int] = []
        self.firsts: list[First] = []
        self.ends: list[End] = []
        self.logprobs: list[LogprobRow] = []
        self.prompt_logprobs: list[LogprobRow] = []
        self.placed: list[int] = []
        self.returned: list[tuple[int, int, float]] = []

    def add(self, rid: int, token: int) -> None:
        """One token of one sequence."""
        self._new_rids.append(rid)
        self._new_tokens.append(token)

    def add_columns(self, rids: Ids, tokens: Column) -> None:
        """One token for each of many sequences."""
        self._pack()
        self._rids.append(rids)
        self._tokens.append(tokens)

    def to_message(self, engine: int, step: int) -> StepOutputs:
        """The message of `engine` up to `step`, with all columns joined."""
        self._pack()
        return StepOutputs(
            engine,
            step,
            b"".join(self._rids),
            b"".join(self._tokens),
            self.firsts,
            self.ends,
            self.logprobs,
            self.prompt_logprobs,
            self.placed,
            self.returned,
        )

    def _pack(self) -> None:
        if self._new_rids:
            self._rids.append(pack_ids(self._new_rids))
            self._tokens.append(pack(self._new_tokens))
            self._new_rids, self._new_tokens = [], []


class Outbox:
    """FrontOutputs by frontend name, emptied by `take`."""

    def __init__(self, engine: int) -> None:
        self.engine = engine
        self.fronts: dict[str, FrontOutputs] = {}

    def to(self, front: str) -> FrontOutputs:
        outputs = self.fronts.get(front)
        if outputs is None:
            outputs = self.fronts[front] = FrontOutputs()
        return outputs

    def add(self, decode_batch: DecodeBatch, tokens: Ints) -> None:
        """One token for each sequence of a decode batch."""
        for share in decode_batch.shares:
            own = tokens if share.places is None else tokens[share.places]
            self.to(share.front).add_columns(share.rids, own.tobytes())

    def drop(self, front: str) -> None:
        """Discards the outputs of a frontend that is gone."""
        self.fronts.pop(front, None)

    def first(self, request: Request) -> None:
        """Prompt usage, sent before or with the sequence's first token."""
        stats = request.stats
        first = First(request.rid, max(0, stats.num_cached), stats.queued_s, stats.prefill_s)
        self.to(request.front).firsts.append(first)

    def take(self, step: int) -> dict[str, StepOutputs]:
        """One message per frontend with pending outputs; `step` is the newest step in it."""
        fronts, self.fronts = self.fronts, {}
        return {name: outputs.to_message(self.engine, step) for name, outputs in fronts.items()}
