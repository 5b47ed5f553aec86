"""What steps produced, gathered per front end: one StepOutputs each, however many events happened in between.

Called by core. Knows the stop rules; knows nothing of blocks or sockets.
"""

from __future__ import annotations

from engine_core.columns import Cohort
from engine_core.request import Request
from transport.messages import End, EndReason, First, LogprobRow, StepOutputs


def end_reason(request: Request, token: int) -> EndReason | None:
    """Whether the row ends with `token`, which is already among its tokens."""
    if token in request.stops and request.num_output > request.params.min_tokens:
        return "stop"
    return "length" if len(request.tokens) >= request.limit else None


class FrontOutputs:
    """The lists of one StepOutputs in the making."""

    __slots__ = ("ends", "firsts", "logprobs", "prompt_logprobs", "rids", "tokens")

    def __init__(self) -> None:
        self.rids: list[int] = []
        self.tokens: list[int] = []
        self.firsts: list[First] = []
        self.ends: list[End] = []
        self.logprobs: list[LogprobRow] = []
        self.prompt_logprobs: list[LogprobRow] = []


class Outbox:
    """FrontOutputs by front-end name, emptied by `take`."""

    def __init__(self, engine: int) -> None:
        self.engine = engine
        self.fronts: dict[str, FrontOutputs] = {}

    def to(self, front: str) -> FrontOutputs:
        outputs = self.fronts.get(front)
        if outputs is None:
            outputs = self.fronts[front] = FrontOutputs()
        return outputs

    def add(self, cohort: Cohort, tokens: list[int]) -> None:
        """One token for each row of a cohort."""
        fronts = cohort.fronts
        if fronts.count(fronts[0]) == len(fronts):
            outputs = self.to(fronts[0])
            outputs.rids += cohort.rids
            outputs.tokens += tokens
            return
        for front, rid, token in zip(fronts, cohort.rids, tokens, strict=True):
            outputs = self.to(front)
            outputs.rids.append(rid)
            outputs.tokens.append(token)

    def drop(self, front: str) -> None:
        """Nobody is there to read it any more."""
        self.fronts.pop(front, None)

    def first(self, request: Request) -> None:
        """What the prompt cost; before or with the row's first token."""
        queued_s = request.first_run_s - request.arrival_s
        prefill_s = request.first_token_s - request.first_run_s
        self.to(request.front).firsts.append(First(request.rid, max(0, request.num_cached), queued_s, prefill_s))

    def take(self, step: int) -> dict[str, StepOutputs]:
        """One message per front end that has something coming; `step` is the newest step that is in it."""
        fronts, self.fronts = self.fronts, {}
        return {
            name: StepOutputs(
                self.engine, step, out.rids, out.tokens, out.firsts, out.ends, out.logprobs, out.prompt_logprobs
            )
            for name, out in fronts.items()
        }
