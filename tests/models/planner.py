"""A random planner for tests of the worker side: places, chunks, preempts and frees rows at random, over one runner.

Freed blocks are poisoned. Whatever it does, every row must get the tokens of its solo run (`run_alone`).
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import strategies as st

from tests.models.rows import new_row, plan_of, rows_and_tokens
from trireme.models.forward import HostKV
from trireme.params import RowParams
from trireme.transport.wire.messages import LogprobRow, NewRow, StepResult
from trireme.workers.cpu.runner import Runner
from trireme.workers.kv.tensors import poison_blocks


@dataclass(eq=False)
class Job:
    """One row as the random planner sees it."""

    prompt: list[int]
    params: RowParams
    outputs: list[int] = field(default_factory=list)
    row: int = -1
    blocks: list[int] = field(default_factory=list)
    num_computed: int = 0
    unsent: int = -1
    logprobs: list[LogprobRow] = field(default_factory=list)
    scores: dict[int, tuple[float, int]] = field(default_factory=dict)  # prompt position -> (logprob, rank)

    @property
    def tokens(self) -> list[int]:
        return self.prompt + self.outputs

    @property
    def is_done(self) -> bool:
        return len(self.outputs) >= self.params.max_tokens


class RandomPlanner:
    """Places, chunks, preempts and frees rows at random, with random slots and random block ids."""

    def __init__(
        self,
        rng: random.Random,
        jobs: list[Job],
        runner: Runner,
        kv: list[HostKV],
        *,
        num_rows: int,
        block_size: int,
        tolerance: float = 1e-4,
    ) -> None:
        self.rng, self.jobs, self.block_size = rng, jobs, block_size
        self.runner, self.kv, self.tolerance = runner, kv, tolerance
        num_blocks = kv[0].k.shape[0]
        self.free_rows, self.free_blocks = list(range(num_rows)), list(range(num_blocks))
        self.freed: list[int] = []

    def run(self) -> None:
        while not all(job.is_done for job in self.jobs):
            self.step()

    def step(self) -> None:
        rng = self.rng
        for job in self.jobs:
            if job.row >= 0 and rng.random() < 0.1:
                self.release(job)
        unfinished = [job for job in self.jobs if not job.is_done]
        chosen = rng.sample(unfinished, rng.randint(1, min(3, len(unfinished))))
        new: list[NewRow] = []
        grown: list[tuple[int, list[int]]] = []
        placed: list[Job] = []
        counts: list[int] = []
        for job in chosen:
            if job.row >= 0:
                had = len(job.blocks)
                counts.append(self.extend(job))
                if len(job.blocks) > had:
                    grown.append((job.row, job.blocks[had:]))
            elif self.free_rows:
                job.row = self.free_rows.pop(rng.randrange(len(self.free_rows)))
                self.freed = [row for row in self.freed if row != job.row or rng.random() < 0.5]
                counts.append(self.extend(job))
                job.unsent = -1
                new.append(new_row(job.row, job.tokens, job.params, num_prompt=len(job.prompt), blocks=job.blocks))
            else:
                continue
            placed.append(job)
        samples = [job.num_computed + n == len(job.tokens) for job, n in zip(placed, counts, strict=True)]
        result = execute(
            self.runner,
            freed=self.freed,
            new=new,
            blocks=grown,
            rows=[job.row for job in placed],
            num_tokens=counts,
            num_computed=[job.num_computed for job in placed],
            tokens=[-1 if self.runner.keeps_tokens else job.unsent for job in placed],
            sample=samples,
        )
        self.freed = []
        self.take(result, placed, counts, samples)

    def extend(self, job: Job) -> int:
        """A random number of tokens to compute, and blocks for them."""
        count = self.rng.randint(1, len(job.tokens) - job.num_computed)
        while len(job.blocks) * self.block_size < job.num_computed + count:
            job.blocks.append(self.free_blocks.pop(self.rng.randrange(len(self.free_blocks))))
        return count

    def release(self, job: Job) -> None:
        """Preempts or ends a row: slot and blocks go back, and the blocks are poisoned."""
        poison_blocks(self.kv, job.blocks)
        self.free_blocks += job.blocks
        self.free_rows.append(job.row)
        self.freed.append(job.row)
        job.row, job.blocks, job.num_computed = -1, [], 0

    def take(self, result: StepResult, placed: list[Job], counts: list[int], samples: list[bool]) -> None:
        assert result.faults == []
        by_row = {job.row: job for job in placed}
        rows, tokens = rows_and_tokens(result)
        assert rows == [job.row for job, sampled in zip(placed, samples, strict=True) if sampled]
        for entry in result.prompt_logprobs:
            job = by_row[entry.rid]
            for i, (ids, values, rank) in enumerate(zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)):
                position = job.num_computed + 1 + i
                assert ids[0] == job.prompt[position]
                job.scores.setdefault(position, (float(values[0]), int(rank)))
                assert job.scores[position] == pytest.approx((float(values[0]), int(rank)), abs=self.tolerance)
        for entry in result.logprobs:
            by_row[entry.rid].logprobs.append(entry)
        for job, count in zip(placed, counts, strict=True):
            job.num_computed, job.unsent = job.num_computed + count, -1
        for row, token in zip(rows, tokens, strict=True):
            by_row[row].outputs.append(token)
            by_row[row].unsent = token
        for job in placed:
            if job.is_done:
                self.release(job)


def execute(runner: Runner, **columns: Any) -> StepResult:
    result = runner.execute(plan_of(**columns))
    assert result is not None
    return result


def run_alone(runner: Runner, blocks: Sequence[int], prompt: list[int], params: RowParams) -> Job:
    """A row by itself in slot 0 with enough `blocks`: the whole prompt at once, then token by token."""
    job = Job(prompt, params)
    placed = new_row(0, prompt, params, blocks=blocks)
    computed, unsent = 0, -1
    while not job.is_done:
        todo = len(job.tokens) - computed
        new = [placed] if computed == 0 else []
        tokens = [-1 if runner.keeps_tokens else unsent]
        result = execute(runner, new=new, rows=[0], num_tokens=[todo], num_computed=[computed], tokens=tokens)
        for entry in result.prompt_logprobs:
            job.scores = {i + 1: (float(entry.logprobs[i, 0]), int(entry.ranks[i])) for i in range(len(entry.logprobs))}
        computed, unsent = computed + todo, rows_and_tokens(result)[1][0]
        job.outputs.append(unsent)
        job.logprobs += result.logprobs
    return job


@st.composite
def job_of(draw: Any, vocab: int) -> tuple[list[int], RowParams]:
    """A prompt of 1-20 tokens and parameters for 1-12 more."""
    prompt = draw(st.lists(st.integers(0, vocab - 1), min_size=1, max_size=20))
    params = RowParams(
        draw(st.integers(1, 12)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.2])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.0, -1.0])),
        presence_penalty=draw(st.sampled_from([0.0, 0.7])),
        seed=draw(st.integers(0, 2**63 - 1)),
        choice=draw(st.integers(0, 2)),
        min_tokens=draw(st.sampled_from([0, 3])),
        eos_token_ids=(1,),
        stop_token_ids=draw(st.sampled_from([(), (2, vocab - 1)])),
        logit_bias=draw(st.sampled_from([(), ((vocab - 1, 3.5), (2, -1.0), (0, 2.0))])),
        bad_token_ids=draw(st.sampled_from([(), (), ((4,), (0,)), ((4,), (3, 2)), ((3, 2) * 5,)])),
        allowed_token_ids=draw(st.sampled_from([(), (), tuple(range(0, vocab, 2))])),
        logprobs=draw(st.sampled_from([-1, 2])),
        prompt_logprobs=draw(st.sampled_from([-1, -1, 1])),
    )
    return prompt, params
