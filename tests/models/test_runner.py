"""The runner under a random planner: whatever the order, chunks, slots, blocks and preemptions, a row's tokens are its own.

The model is a small paged-attention decoder in plain torch, written here, whose every output depends on the whole context.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from models.forward import ForwardBatch, KVLayer
from tests.models.rows import new_row, plan_of
from transport.messages import LogprobRow, NewRow, StepResult
from trireme.errors import EngineError
from trireme.mesh import Mesh
from trireme.params import RowParams
from workers.batch import Batch
from workers.inputs import InputBuilder
from workers.kv_tensors import allocate_kv, copy_blocks, poison_blocks
from workers.runner import Runner

VOCAB, DIM, MAX_LEN = 48, 8, 64
SOLO = Mesh(1, 1, 1)


class Attention:
    """One layer: token and position embeddings, paged attention over the row's own context, an output matrix."""

    vocab_size, num_kv_layers, kv_heads, head_dim = VOCAB, 1, 1, DIM

    def __init__(self, block_size: int) -> None:
        generator = torch.Generator().manual_seed(3)
        self.block_size = block_size
        self.embed = torch.randn(VOCAB, DIM, generator=generator)
        self.place = torch.randn(MAX_LEN, DIM, generator=generator)
        self.head = torch.randn(DIM, VOCAB, generator=generator) * 2
        self.fail_token = -1
        self.nan_token = -1
        self.seen: list[int] = []  # tokens per forward

    def forward(self, batch: ForwardBatch, kv: list[KVLayer]) -> Tensor:
        self.seen.append(batch.token_ids.numel())
        if (batch.token_ids == self.fail_token).any():
            raise RuntimeError("scripted failure")
        x = self.embed[batch.token_ids.long()] + self.place[batch.positions.long()]
        block, offset = batch.slots.long() // self.block_size, batch.slots.long() % self.block_size
        kv[0].k[block, 0, :, offset] = x
        kv[0].v[block, 0, offset, :] = x.flip(-1)
        out = torch.stack([self._attend(batch, kv[0], x, t) for t in batch.logits_index.tolist()] or [x[0]])
        logits = (out[: batch.logits_index.numel(), :, None] * self.head).sum(1)
        logits[batch.token_ids[batch.logits_index.long()] == self.nan_token] = float("nan")
        return logits

    def _attend(self, batch: ForwardBatch, kv: KVLayer, x: Tensor, token: int) -> Tensor:
        row = int((batch.query_start <= token).sum()) - 1
        length = int(batch.positions[token]) + 1
        blocks = batch.block_table[row, : -(-length // self.block_size)].long()
        keys = kv.k[blocks, 0].transpose(1, 2).reshape(-1, DIM)[:length]
        values = kv.v[blocks, 0].reshape(-1, DIM)[:length]
        weights = (keys * x[token]).sum(-1).softmax(0)
        return (weights[:, None] * values).sum(0)


def make_runner(
    num_rows: int = 6, block_size: int = 4, num_blocks: int = 80, mesh: Mesh = SOLO, poison: bool = True
) -> tuple[Runner, Batch, Attention, list[KVLayer]]:
    model = Attention(block_size)
    kv = allocate_kv(model, num_blocks, block_size, torch.float32)
    poison_blocks(kv, list(range(num_blocks)))
    batch = Batch(num_rows, MAX_LEN, block_size, VOCAB, num_blocks, poison=poison)
    return Runner(model, kv, batch, InputBuilder(4, 2, 2), mesh), batch, model, kv


def execute(runner: Runner, **columns: Any) -> StepResult:
    result = runner.execute(plan_of(**columns))
    assert result is not None
    return result


# ---------------------------------------------------------------- rows under a random planner


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

    def __init__(self, rng: random.Random, jobs: list[Job], *, num_rows: int, block_size: int, num_blocks: int) -> None:
        self.rng, self.jobs, self.block_size = rng, jobs, block_size
        self.runner, _, _, self.kv = make_runner(num_rows, block_size, num_blocks)
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
            tokens=[job.unsent for job in placed],
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
        assert result.rows == [job.row for job, sampled in zip(placed, samples, strict=True) if sampled]
        for entry in result.prompt_logprobs:
            job = by_row[entry.rid]
            for i, (ids, values, rank) in enumerate(zip(entry.token_ids, entry.logprobs, entry.ranks, strict=True)):
                position = job.num_computed + 1 + i
                assert ids[0] == job.prompt[position]
                job.scores.setdefault(position, (float(values[0]), int(rank)))
                assert job.scores[position] == pytest.approx((float(values[0]), int(rank)), abs=1e-4)
        for entry in result.logprobs:
            by_row[entry.rid].logprobs.append(entry)
        for job, count in zip(placed, counts, strict=True):
            job.num_computed, job.unsent = job.num_computed + count, -1
        for row, token in zip(result.rows, result.tokens, strict=True):
            by_row[row].outputs.append(token)
            by_row[row].unsent = token
        for job in placed:
            if job.is_done:
                self.release(job)


def run_alone(prompt: list[int], params: RowParams) -> Job:
    """A row by itself: the whole prompt at once, then token by token."""
    job, (runner, _, _, _) = Job(prompt, params), make_runner(1, 16, 4)
    placed = new_row(0, prompt, params, blocks=range(4))
    computed, unsent = 0, -1
    while not job.is_done:
        todo = len(job.tokens) - computed
        new = [placed] if computed == 0 else []
        result = execute(runner, new=new, rows=[0], num_tokens=[todo], num_computed=[computed], tokens=[unsent])
        for entry in result.prompt_logprobs:
            job.scores = {i + 1: (float(entry.logprobs[i, 0]), int(entry.ranks[i])) for i in range(len(entry.logprobs))}
        computed, unsent = computed + todo, result.tokens[0]
        job.outputs.append(unsent)
        job.logprobs += result.logprobs
    return job


@st.composite
def job_of(draw: Any) -> tuple[list[int], RowParams]:
    prompt = draw(st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=20))
    params = RowParams(
        draw(st.integers(1, 12)),
        temperature=draw(st.sampled_from([0.0, 0.0, 1.0, 1.5])),
        top_k=draw(st.sampled_from([0, 0, 5])),
        top_p=draw(st.sampled_from([1.0, 0.9])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.3])),
        frequency_penalty=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 2**63 - 1)),
        choice=draw(st.integers(0, 2)),
        min_tokens=draw(st.sampled_from([0, 3])),
        eos_token_ids=(1,),
        allowed_token_ids=draw(st.sampled_from([(), (), tuple(range(0, VOCAB, 2))])),
        logprobs=draw(st.sampled_from([-1, 2])),
        prompt_logprobs=draw(st.sampled_from([-1, -1, 1])),
    )
    return prompt, params


@settings(deadline=None, max_examples=40)
@given(
    st.lists(job_of(), min_size=1, max_size=5), st.sampled_from([1, 3, 4, 16]), st.integers(2, 6), st.integers(0, 2**32)
)
def test_any_plan_gives_each_row_its_own_tokens(
    jobs: list[tuple[list[int], RowParams]], block_size: int, num_rows: int, seed: int
) -> None:
    """Chunks, company, slots, blocks, preemption by recompute: tokens equal the solo run, logprobs within 1e-4 (O20).
    Freed slots and blocks are poisoned, so a read of a dead row (S13) or of an unwritten slot changes the answer."""
    alone = [run_alone(*job) for job in jobs]
    together = [Job(*job) for job in jobs]
    num_blocks = sum(-(-32 // block_size) for _ in jobs)
    RandomPlanner(random.Random(seed), together, num_rows=num_rows, block_size=block_size, num_blocks=num_blocks).run()
    for mine, theirs in zip(together, alone, strict=True):
        assert mine.outputs == theirs.outputs
        assert mine.scores == {at: pytest.approx(score, abs=1e-4) for at, score in theirs.scores.items()}
        assert len(mine.scores) == (len(mine.prompt) - 1 if mine.params.prompt_logprobs >= 0 else 0)
        for a, b in zip(mine.logprobs, theirs.logprobs, strict=True):
            np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_a_mask_dies_with_its_row() -> None:
    """S13: an allow-list and a penalty of a dead row do not touch the next tenant of its slot, freed first or not."""
    narrow = RowParams(8, temperature=0.0, allowed_token_ids=(5,), repetition_penalty=50.0, logprobs=1)
    plain = RowParams(8, temperature=0.0)
    expected = run_alone([1, 2, 3], plain).outputs[0]
    assert expected != 5
    for freed in ([0], []):
        runner, batch, _, _ = make_runner()
        first = execute(runner, new=[new_row(0, [9, 9], narrow, blocks=[0])], rows=[0], num_tokens=[2])
        assert first.tokens == [5]
        placed = new_row(0, [1, 2, 3], plain, blocks=[1])
        second = execute(runner, freed=freed, new=[placed], rows=[0], num_tokens=[3])
        assert (second.tokens, second.logprobs) == ([expected], [])
        assert batch.num_blocks[0] == 1


# ---------------------------------------------------------------- faults


def three_rows(runner: Runner, middle: list[int], **params: Any) -> StepResult:
    greedy = RowParams(4, temperature=0.0, **params)
    new = [new_row(i, tokens, greedy, blocks=[i]) for i, tokens in enumerate([[1, 2], middle, [3, 4]])]
    return execute(runner, new=new, rows=[0, 1, 2], num_tokens=[2, len(middle), 2])


def test_nan_logits_fail_their_row_only() -> None:
    runner, _, model, _ = make_runner()
    sound = three_rows(make_runner()[0], [7, 8])
    model.nan_token = 8
    result = three_rows(runner, [7, 8])
    assert (result.rows, result.tokens) == ([0, 2], [sound.tokens[0], sound.tokens[2]])
    assert [fault.row for fault in result.faults] == [1]


def test_a_row_that_makes_the_model_raise_is_found_by_halving() -> None:
    """R16: batch-mates get the tokens they would have had."""
    runner, _, model, _ = make_runner()
    sound = three_rows(make_runner()[0], [7, 8])
    model.fail_token = 8
    result = three_rows(runner, [7, 8])
    assert (result.rows, result.tokens) == ([0, 2], [sound.tokens[0], sound.tokens[2]])
    assert [(fault.row, "scripted failure" in fault.error) for fault in result.faults] == [(1, True)]


def test_a_model_that_fails_on_every_row_is_the_engines_error() -> None:
    runner, _, model, _ = make_runner()
    model.fail_token = 2
    greedy = RowParams(4, temperature=0.0)
    new = [new_row(i, [2], greedy, blocks=[i]) for i in range(3)]
    with pytest.raises(EngineError, match="each of 3 rows"):
        runner.execute(plan_of(new=new, rows=[0, 1, 2]))


def test_with_other_workers_in_the_step_the_models_error_goes_up() -> None:
    """Trying again alone would leave the other ranks waiting in a collective."""
    runner, _, model, _ = make_runner(mesh=Mesh(1, 1, 2))
    model.fail_token = 8
    with pytest.raises(RuntimeError, match="scripted failure"):
        three_rows(runner, [7, 8])


def test_a_token_outside_the_vocabulary_fails_its_row_only() -> None:
    result = three_rows(make_runner()[0], [7, VOCAB])
    assert result.rows == [0, 2]
    assert [(fault.row, "vocabulary" in fault.error) for fault in result.faults] == [(1, True)]


def test_a_row_that_could_not_be_placed_keeps_failing_until_freed() -> None:
    runner, batch, _, _ = make_runner()
    three_rows(runner, [VOCAB])
    again = execute(runner, rows=[1, 0], num_computed=[1, 2], tokens=[3, 4])
    assert [fault.row for fault in again.faults] == [1]
    assert again.rows == [0]
    placed = new_row(1, [5], RowParams(4, temperature=0.0), blocks=[9])
    assert execute(runner, freed=[1], new=[placed], rows=[1]).rows == [1]
    assert batch.faults == {}


@pytest.mark.parametrize(
    "columns",
    [
        {"rows": [0], "num_computed": [2], "tokens": [-1]},  # token 2 is not known
        {"rows": [0], "num_tokens": [3], "num_computed": [2], "tokens": [9]},
        {"rows": [0], "num_tokens": [0], "num_computed": [2]},
        {"rows": [0], "num_computed": [-1]},
        {"rows": [5]},  # no such row
        {"rows": [], "blocks": [(0, [80])]},  # no such block
        {"rows": [], "blocks": [(0, list(range(20)))]},  # more than max_len needs
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_any_kernel(columns: dict[str, Any]) -> None:
    runner, _, _, kv = make_runner()
    execute(runner, new=[new_row(0, [1, 2], RowParams(4, temperature=0.0), blocks=[0])], rows=[0], num_tokens=[2])
    before = kv[0].k.clone()
    with pytest.raises(EngineError):
        runner.execute(plan_of(**columns))
    assert torch.equal(kv[0].k, before) or torch.allclose(kv[0].k, before, equal_nan=True)


# ---------------------------------------------------------------- shapes of steps


def test_prompt_logprobs_beyond_the_logits_budget_are_computed_in_pieces() -> None:
    """Same values, one entry per row; other rows run once, in the last piece, with everything else."""
    params = RowParams(2, temperature=0.0, prompt_logprobs=2)
    prompt = [(7 * i) % VOCAB for i in range(30)]
    whole = run_alone(prompt, params)
    runner, _, model, _ = make_runner(block_size=16)
    runner.max_logits = 8
    new = [new_row(0, prompt, params, blocks=[0, 1]), new_row(1, [1, 2], RowParams(4, temperature=0.0), blocks=[2])]
    result = execute(runner, new=new, rows=[0, 1], num_tokens=[30, 2])
    assert model.seen == [8, 8, 8, 6 + 2]
    assert result.rows == [0, 1]
    assert result.tokens[0] == whole.outputs[0]
    (entry,) = result.prompt_logprobs
    assert entry.token_ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(entry.logprobs[:, 0], [whole.scores[i][0] for i in range(1, 30)], atol=1e-5)


def test_scoring_a_prompt_without_sampling() -> None:
    """O06: max_tokens 0 plans the prompt with sample off; there are scores and no token."""
    params = RowParams(0, prompt_logprobs=1)
    placed = new_row(0, [1, 2, 3], params, blocks=[0])
    result = execute(make_runner()[0], new=[placed], rows=[0], num_tokens=[3], sample=[False])
    assert (result.rows, result.tokens, result.faults) == ([], [], [])
    (entry,) = result.prompt_logprobs
    assert entry.token_ids[:, 0].tolist() == [2, 3]
    assert np.isfinite(entry.logprobs).all()
    assert (entry.logprobs <= 0).all()


def test_a_plan_without_rows_runs_no_model() -> None:
    runner, batch, model, _ = make_runner()
    three_rows(runner, [7, 8])
    result = execute(runner, freed=[0, 2], rows=[])
    assert (result.rows, result.faults, len(model.seen)) == ([], [], 1)
    assert batch.num_rows() == 1


def test_only_the_reporting_worker_answers() -> None:
    new = [new_row(0, [1], RowParams(4, temperature=0.0), blocks=[0])]
    mesh = Mesh(1, 2, 2)
    answers = [make_runner(mesh=mesh.at_worker(w))[0].execute(plan_of(new=new, rows=[0])) for w in range(4)]
    assert [answer is not None for answer in answers] == [False, False, True, False]


def test_block_copies_act_one_after_the_other() -> None:
    _, _, _, kv = make_runner(num_blocks=4, block_size=2)
    for block in range(4):
        kv[0].k[block] = kv[0].v[block] = float(block)
    copy_blocks(kv, [(3, 2), (1, 0)])
    assert kv[0].k[:, 0, 0, 0].tolist() == [1.0, 1.0, 3.0, 3.0]
    copy_blocks(kv, [(0, 2), (2, 3)])
    assert kv[0].v[:, 0, 0, 0].tolist() == [1.0, 1.0, 1.0, 1.0]
