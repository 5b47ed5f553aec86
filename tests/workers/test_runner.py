"""The runner under a random planner: whatever the order, chunks, slots, blocks and preemptions, a row's tokens are its own.

The model is a small paged-attention decoder in plain torch, written here, whose every output depends on the whole context.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.planner import Job, RandomPlanner, execute, job_of, run_alone
from tests.models.rows import new_row, plan_of, rows_and_tokens
from trireme.errors import EngineError
from trireme.models.cpu.tensors import OverTensors
from trireme.models.forward import ForwardBatch, HostKV, KVLayer
from trireme.params import RowParams
from trireme.topology.lockstep import Agreed, Ballot, agree
from trireme.topology.mesh import Mesh
from trireme.transport.wire.columns import pack, unpack
from trireme.transport.wire.messages import StepResult
from trireme.workers.batch import Batch
from trireme.workers.cpu.runner import LockstepPeers, Runner
from trireme.workers.inputs import InputBuilder
from trireme.workers.kv.tensors import allocate_kv, copy_blocks, poison_blocks

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
    num_rows: int = 6,
    block_size: int = 4,
    num_blocks: int = 80,
    mesh: Mesh = SOLO,
    poison: bool = True,
    lockstep_peers: LockstepPeers | None = None,
) -> tuple[Runner, Batch, Attention, list[HostKV]]:
    model = Attention(block_size)
    kv = allocate_kv(model, num_blocks, block_size, np.dtype(np.float32))
    poison_blocks(kv, list(range(num_blocks)))
    batch = Batch(num_rows, MAX_LEN, block_size, VOCAB, num_blocks, poison=poison)
    runner = Runner(OverTensors(model), kv, batch, InputBuilder(4, 2, 2), mesh, lockstep_peers=lockstep_peers)
    return runner, batch, model, kv


# ---------------------------------------------------------------- rows under a random planner


def solo(prompt: list[int], params: RowParams) -> Job:
    return run_alone(make_runner(1, 16, 4)[0], range(4), prompt, params)


@settings(deadline=None, max_examples=40)
@given(
    st.lists(job_of(VOCAB), min_size=1, max_size=5),
    st.sampled_from([1, 3, 4, 16]),
    st.integers(2, 6),
    st.integers(0, 2**32),
)
def test_any_plan_gives_each_row_its_own_tokens(
    jobs: list[tuple[list[int], RowParams]], block_size: int, num_rows: int, seed: int
) -> None:
    """Chunks, company, slots, blocks, preemption by recompute: tokens equal the solo run, logprobs within 1e-4 (O20).
    Freed slots and blocks are poisoned, so a read of a dead row (S13) or of an unwritten slot changes the answer."""
    alone = [solo(*job) for job in jobs]
    together = [Job(*job) for job in jobs]
    num_blocks = sum(-(-32 // block_size) for _ in jobs)
    runner, _, _, kv = make_runner(num_rows, block_size, num_blocks)
    RandomPlanner(random.Random(seed), together, runner, kv, num_rows=num_rows, block_size=block_size).run()
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
    expected = solo([1, 2, 3], plain).outputs[0]
    assert expected != 5
    for freed in ([0], []):
        runner, batch, _, _ = make_runner()
        first = execute(runner, new=[new_row(0, [9, 9], narrow, blocks=[0])], rows=[0], num_tokens=[2])
        assert first.tokens == pack([5])
        placed = new_row(0, [1, 2, 3], plain, blocks=[1])
        second = execute(runner, freed=freed, new=[placed], rows=[0], num_tokens=[3])
        assert (second.tokens, second.logprobs) == (pack([expected]), [])
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
    expected = rows_and_tokens(sound)[1]
    assert rows_and_tokens(result) == ([0, 2], [expected[0], expected[2]])
    assert [fault.row for fault in result.faults] == [1]


def test_a_row_whose_prompt_scores_fail_gives_nothing_else() -> None:
    """NaN at a prompt position whose token is scored, while the sampled position is sound."""
    runner, _, model, _ = make_runner()
    model.nan_token = 7
    result = three_rows(runner, [7, 8], logprobs=1, prompt_logprobs=1)
    assert [fault.row for fault in result.faults] == [1]
    assert result.rows == pack([0, 2])
    assert [entry.rid for entry in result.logprobs] == [0, 2]
    assert [entry.rid for entry in result.prompt_logprobs] == [0, 2]


def test_a_row_that_makes_the_model_raise_is_found_by_halving() -> None:
    """R16: batch-mates get the tokens they would have had."""
    runner, _, model, _ = make_runner()
    sound = three_rows(make_runner()[0], [7, 8])
    model.fail_token = 8
    result = three_rows(runner, [7, 8])
    expected = rows_and_tokens(sound)[1]
    assert rows_and_tokens(result) == ([0, 2], [expected[0], expected[2]])
    assert [(fault.row, "scripted failure" in fault.error) for fault in result.faults] == [(1, True)]


def test_a_model_that_fails_on_every_row_is_the_engines_error() -> None:
    runner, _, model, _ = make_runner()
    model.fail_token = 2
    greedy = RowParams(4, temperature=0.0)
    new = [new_row(i, [2], greedy, blocks=[i]) for i in range(3)]
    with pytest.raises(EngineError, match="each of 3 sequences"):
        runner.execute(plan_of(new=new, rows=[0, 1, 2]))


def test_with_other_workers_in_the_step_the_models_error_goes_up() -> None:
    """Trying again alone would leave the other ranks waiting in a collective."""
    runner, _, model, _ = make_runner(mesh=Mesh(1, 1, 2))
    model.fail_token = 8
    with pytest.raises(RuntimeError, match="scripted failure"):
        three_rows(runner, [7, 8])


def test_a_token_outside_the_vocabulary_fails_its_row_only() -> None:
    result = three_rows(make_runner()[0], [7, VOCAB])
    assert result.rows == pack([0, 2])
    assert [(fault.row, "vocabulary" in fault.error) for fault in result.faults] == [(1, True)]


def test_a_row_that_could_not_be_placed_keeps_failing_until_freed() -> None:
    runner, batch, _, _ = make_runner()
    three_rows(runner, [VOCAB])
    again = execute(runner, rows=[1, 0], num_computed=[1, 2], tokens=[3, 4])
    assert [fault.row for fault in again.faults] == [1]
    assert again.rows == pack([0])
    placed = new_row(1, [5], RowParams(4, temperature=0.0), blocks=[9])
    assert execute(runner, freed=[1], new=[placed], rows=[1]).rows == pack([1])
    assert batch.faults == {}


@pytest.mark.parametrize(
    "columns",
    [
        {"rows": [0], "num_computed": [2], "tokens": [-1]},  # token 2 is not known
        {"rows": [0], "num_tokens": [3], "num_computed": [2], "tokens": [9]},
        {"rows": [0], "num_tokens": [0], "num_computed": [2]},
        {"rows": [1], "num_computed": [4], "tokens": [9]},  # its one block is full
        {"rows": [0], "num_computed": [-1]},
        {"rows": [5]},  # no such row
        {"rows": [-1]},
        {"rows": [2**31 - 1]},
        {"rows": [-1], "tokens": [3]},
        {"rows": [], "blocks": [(-1, [1])]},
        {"rows": [], "blocks": [(0, [-1])]},
        {"rows": [], "blocks": [(0, [80])]},  # no such block
        {"rows": [], "blocks": [(0, list(range(20)))]},  # more than max_len needs
    ],
)
def test_a_plan_that_does_not_fit_is_refused_before_any_kernel(columns: dict[str, Any]) -> None:
    runner, _, _, kv = make_runner()
    greedy = RowParams(4, temperature=0.0)
    new = [new_row(0, [1, 2], greedy, blocks=[0]), new_row(1, [1, 2, 3, 4], greedy, blocks=[1])]
    execute(runner, new=new, rows=[0, 1], num_tokens=[2, 4])
    before = kv[0].k.copy()
    with pytest.raises(EngineError):
        runner.execute(plan_of(**columns))
    assert np.array_equal(kv[0].k, before, equal_nan=True)


# ---------------------------------------------------------------- shapes of steps


def test_prompt_logprobs_beyond_the_logits_budget_are_computed_in_pieces() -> None:
    """Same values, one entry per row; other rows run once, in the last piece, with everything else."""
    params = RowParams(2, temperature=0.0, prompt_logprobs=2)
    prompt = [(7 * i) % VOCAB for i in range(30)]
    whole = solo(prompt, params)
    runner, _, model, _ = make_runner(block_size=16)
    runner.max_logits = 8
    new = [new_row(0, prompt, params, blocks=[0, 1]), new_row(1, [1, 2], RowParams(4, temperature=0.0), blocks=[2])]
    result = execute(runner, new=new, rows=[0, 1], num_tokens=[30, 2])
    assert model.seen == [8, 8, 8, 6 + 2]
    assert result.rows == pack([0, 1])
    assert unpack(result.tokens)[0] == whole.outputs[0]
    (entry,) = result.prompt_logprobs
    assert entry.token_ids[:, 0].tolist() == prompt[1:]
    np.testing.assert_allclose(entry.logprobs[:, 0], [whole.scores[i][0] for i in range(1, 30)], atol=1e-5)


class Others:
    """Another engine in lock step, which runs so many forwards in each step."""

    def __init__(self, num_pieces: int) -> None:
        self.ballot = Ballot(0, 0, True, False, 40, 0, num_pieces)
        self.events: list[str] = []

    def meet(self, ballot: Ballot | None, num_tokens: int, num_pieces: int) -> Agreed:
        self.events.append(f"meet {num_tokens} {num_pieces}")
        return agree([self.ballot, Ballot(0, 0, True, False, num_tokens, 0, num_pieces)])

    def dummy_forward(self) -> None:
        self.events.append("dummy_forward")


@pytest.mark.parametrize("others", [1, 4, 6])
def test_engines_in_lock_step_run_as_many_forwards(others: int) -> None:
    """As many as the one that cuts its step into the most pieces; the values are those of an engine alone."""
    peers = Others(others)
    params = RowParams(2, temperature=0.0, prompt_logprobs=2)
    prompt = [(7 * i) % VOCAB for i in range(30)]
    runner, _, model, _ = make_runner(block_size=16, lockstep_peers=peers)
    runner.max_logits = 8
    result = execute(runner, new=[new_row(0, prompt, params, blocks=[0, 1])], rows=[0], num_tokens=[30])
    assert model.seen == [8, 8, 8, 6]
    assert peers.events == ["meet 30 4", *["dummy_forward"] * max(0, others - 4)]
    assert result.agreed == Agreed(True, False, 40, 0, max(4, others))
    assert unpack(result.tokens)[0] == solo(prompt, params).outputs[0]
    execute(runner, freed=[0], rows=[])
    assert peers.events[-1 - others :] == ["meet 0 0", *["dummy_forward"] * others]
    assert len(model.seen) == 4


def test_scoring_a_prompt_without_sampling() -> None:
    """O06: max_tokens 0 plans the prompt with sample off; there are scores and no token."""
    params = RowParams(0, prompt_logprobs=1)
    placed = new_row(0, [1, 2, 3], params, blocks=[0])
    result = execute(make_runner()[0], new=[placed], rows=[0], num_tokens=[3], sample=[False])
    assert (result.rows, result.tokens, result.faults) == (b"", b"", [])
    (entry,) = result.prompt_logprobs
    assert entry.token_ids[:, 0].tolist() == [2, 3]
    assert np.isfinite(entry.logprobs).all()
    assert (entry.logprobs <= 0).all()


def test_a_plan_without_rows_runs_no_model() -> None:
    runner, batch, model, _ = make_runner()
    three_rows(runner, [7, 8])
    result = execute(runner, freed=[0, 2], rows=[])
    assert (result.rows, result.faults, len(model.seen)) == (b"", [], 1)
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
