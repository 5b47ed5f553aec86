"""Drives an EngineCore with FakeWorkers and no process, socket or clock: tests say what happens when.

Every worker of the engine executes every plan in order; the answers are held back until the test lets them in.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import msgspec
import numpy as np

from trireme.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig, SchedulerConfig
from trireme.engine_core.core import EngineCore
from trireme.engine_core.scheduling.policies.base import PolicySettings
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.params import RowParams
from trireme.transport.wire.columns import unpack, unpack_ids
from trireme.transport.wire.messages import End, First, LogprobRow, StepPlan, StepResult, Submit, WorkerInit
from trireme.workers.fake import FakeModel, FakeOptions, FakeWorker, expected_tokens

FRONT = "front-0"
VOCAB = 320


def make_limits(**changes: object) -> Limits:
    """Small limits: blocks of 4 tokens, so that a few tokens make many blocks."""
    values: dict[str, object] = {
        "max_len": 64,
        "vocab_size": VOCAB,
        "num_blocks": 64,
        "block_size": 4,
        "max_num_seqs": 8,
        "max_num_tokens": 64,
        "chunk": 64,
        "max_waiting": 64,
        "max_waiting_tokens": 4096,
    }
    return Limits(**{**values, **changes})  # type: ignore[arg-type]


def make_worker(limits: Limits, fake: FakeOptions, worker: int = 0, pp: int = 1, *, ahead: bool = False) -> FakeWorker:
    config = EngineConfig(
        model=ModelConfig(model="no such directory"),
        cache=CacheConfig(block_size=limits.block_size),
        parallel=ParallelConfig(pp=pp, worker="fake"),
        scheduler=SchedulerConfig(async_steps=ahead),
    )
    init = WorkerInit(msgspec.msgpack.encode(config), 0, worker)
    fake_worker = FakeWorker(init, lambda phase, done, total: None)
    fake_worker.model = FakeModel(VOCAB, fake)
    fake_worker.setup_kv(limits.num_blocks)
    return fake_worker


@dataclass(eq=False)
class Row:
    """What a front end would know of a submitted row."""

    prompt: list[int]
    params: RowParams
    tokens: list[int] = field(default_factory=list)
    firsts: list[First] = field(default_factory=list)
    ends: list[End] = field(default_factory=list)
    logprobs: list[LogprobRow] = field(default_factory=list)
    prompt_logprobs: list[LogprobRow] = field(default_factory=list)

    @property
    def end(self) -> End:
        assert len(self.ends) == 1, f"ends: {self.ends}"
        return self.ends[0]


class Driver:
    """An engine core, its fake workers, and what came out of it, per row. `depth` is that of a pipeline; with `ahead` there is
    one worker, which keeps its tokens, and two plans may be under way."""

    def __init__(
        self,
        limits: Limits | None = None,
        *,
        depth: int = 1,
        ahead: bool = False,
        fake: FakeOptions | None = None,
        policy: str = "fcfs",
        settings: PolicySettings = PolicySettings(),
    ) -> None:
        self.limits = limits or make_limits()
        self.fake = fake or FakeOptions()
        self.core = EngineCore(
            self.limits,
            depth=2 if ahead else depth,
            ahead=ahead,
            check=True,
            policy=policy,
            policy_settings=settings,
        )
        stages = range(1 if ahead else depth)
        self.workers = [make_worker(self.limits, self.fake, stage, len(stages), ahead=ahead) for stage in stages]
        self.answers: deque[StepResult] = deque()
        self.plans: list[StepPlan] = []
        self.rows: dict[tuple[str, int], Row] = {}
        self.now = 0.0
        self._next_rid = 0

    def submit(
        self,
        prompt: list[int] | int,
        max_tokens: int = 8,
        *,
        front: str = FRONT,
        salt: bytes = b"",
        deadline_s: float = 0.0,
        num_replayed: int = 0,
        priority: int = 0,
        client: bytes = b"",
        total_s: float = 0.0,
        num_moves: int = 0,
        waited_s: float = 0.0,
        temperature: float = 0.0,
        **params: object,
    ) -> Row:
        """Submits a row; a number as prompt means that many made-up tokens (the same ones for the same number)."""
        ids = [(7 * i + prompt) % 250 for i in range(prompt)] if isinstance(prompt, int) else prompt
        row_params = RowParams(max_tokens=max_tokens, temperature=temperature, **params)  # type: ignore[arg-type]
        row = Row(ids, row_params)
        self._next_rid += 1
        self.rows[front, self._next_rid] = row
        message = Submit(
            self._next_rid,
            np.array(ids, np.int32),
            row_params,
            salt,
            ticket=self._next_rid,
            deadline_s=deadline_s,
            num_replayed=num_replayed,
            priority=priority,
            client=client,
            total_s=total_s,
            num_moves=num_moves,
            waited_s=waited_s,
        )
        self.core.submit(front, message, self.now)
        self.collect()
        return row

    def rid_of(self, row: Row) -> tuple[str, int]:
        return next(key for key, value in self.rows.items() if value is row)

    def abort(self, row: Row) -> None:
        front, rid = self.rid_of(row)
        self.core.abort(front, [rid])
        self.collect()

    def plan(self) -> StepPlan | None:
        """Makes the next plan and lets the workers run it; their answer waits."""
        plan = self.core.next_plan(self.now)
        if plan is not None:
            self.plans.append(plan)
            results = [worker.execute(plan) for worker in self.workers]
            assert [result for result in results if result] == results[-1:], "exactly the last stage reports"
            assert results[-1] is not None
            self.answers.append(results[-1])
        return plan

    def answer(self) -> None:
        """Lets the oldest waiting answer in."""
        self.now += 0.01
        self.core.on_result(self.answers.popleft(), self.now)
        self.collect()

    def step(self) -> bool:
        """Plans as much as the depth allows, then takes one answer. False when there was nothing to do."""
        while self.plan() is not None:
            pass
        if not self.answers:
            return False
        self.answer()
        return True

    def run(self, most: int = 2000) -> None:
        """Steps until idle; then everything must be back where it came from."""
        for _ in range(most):
            if not self.step():
                break
        assert self.core.is_idle, f"not idle after {most} steps: {self.core.audit()}"
        counts = self.core.audit()
        assert counts.num_free + counts.num_cached == counts.num_blocks
        assert counts.num_running == counts.num_waiting == counts.num_in_flight == 0

    def collect(self) -> None:
        for front, out in self.core.take_outputs().items():
            for rid, token in zip(unpack_ids(out.rids).tolist(), unpack(out.tokens).tolist(), strict=True):
                row = self.rows[front, rid]
                assert not row.ends, "token after the end"
                row.tokens.append(token)
            for first in out.firsts:
                self.rows[front, first.rid].firsts.append(first)
            for end in out.ends:
                row = self.rows[front, end.rid]
                row.ends.append(end)
                assert len(row.ends) == 1, f"two ends: {row.ends}"
            for scores in out.logprobs:
                self.rows[front, scores.rid].logprobs.append(scores)
            for scores in out.prompt_logprobs:
                self.rows[front, scores.rid].prompt_logprobs.append(scores)

    def solo(self, row: Row) -> list[int]:
        """What the row would emit all by itself."""
        count = min(row.params.max_tokens, self.limits.max_len - len(row.prompt))
        tokens = expected_tokens(row.prompt, row.params, self.fake, count)
        stops = {*row.params.eos_token_ids, *row.params.stop_token_ids}
        for i, token in enumerate(tokens):
            if token in stops and i >= row.params.min_tokens:
                return tokens[: i + 1]
        return tokens

    def check_tokens(self, row: Row) -> None:
        """A finished row emitted exactly its solo tokens; an ended one a prefix of them."""
        solo = self.solo(row)
        if row.end.reason in ("stop", "length"):
            assert row.tokens == solo
        else:
            assert row.tokens == solo[: len(row.tokens)]
