"""A stand-in for a GPU model and its sampler on the CPU: every logit depends on every token that a row reads back from its cache,
so a wrong block, slot, position or token shows in what is sampled next.
"""

from __future__ import annotations

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.models.arch.rope import POSITIONS, TableRows
from trireme.models.cuda.attention.prefill_plan import PIECES, Rules
from trireme.models.cuda.ops import JOB, MOST_LOGPROBS, NOT_FINITE, NOTHING_LEFT, CudaPagedKV
from trireme.models.cuda.reference import note_output_reference, ruled_logits_reference
from trireme.topology.mesh import Mesh
from trireme.workers.sampling.gumbel import NoiseField, argmax_among, noise_key
from trireme.workers.sampling.logprobs import logprob_row
from trireme.workers.sampling.top_k_top_p import kept

VOCAB = 96
TURN = 128  # of a row of the table, beside a token


def _written(cache: Tensor, slots: Tensor, values: Tensor) -> Tensor:
    """The cache [blocks, 1, size, 2] with the values in their slots, and the values of all slots."""
    flat = cache.transpose(1, 2).reshape(-1, 2).clone()
    flat[slots] = values.float()[:, None]
    cache.copy_(flat.view(cache.shape[0], cache.shape[2], 1, 2).transpose(1, 2))
    return flat[:, 0]


class TwinModel:
    """The interface of models.cuda.decoder.CudaModel. Its cache holds token + 1, and which row of a table turned it; a NaN
    read back spoils the row."""

    vocab_size, num_kv_layers, kv_heads, head_dim = VOCAB, 1, 1, 2
    mesh = Mesh(1, 1, 1)

    def __init__(self, rules: Rules = PIECES, table_rows: TableRows = POSITIONS) -> None:
        self.prompt_attention = SimpleNamespace(rules=rules)
        self.table_rows = table_rows

    def allocate_kv(self, num_blocks: int, block_size: int) -> list[CudaPagedKV]:
        shape = (num_blocks, 1, block_size, 2)
        return [CudaPagedKV(torch.full(shape, float("nan")), torch.full(shape, float("nan")))]

    def scratch_floats(self, rows: int, splits: int) -> int:
        return 0

    def run(self, batch: Any, kv: list[CudaPagedKV], scratch: Tensor | None = None) -> Tensor:
        size, written = kv[0].k.shape[2], batch.slots >= 0
        at = batch.slots[written].long()
        tokens = _written(kv[0].k, at, batch.token_ids[written] + 1)
        flat = tokens + TURN * _written(kv[0].v, at, batch.positions[written])
        logits = torch.zeros(batch.token_ids.numel(), VOCAB)
        for row, context in enumerate(batch.context_len[: batch.num_decodes].tolist()):
            logits[row] = self._logits(flat[_slots(batch.block_table[row], int(context), size)])
        if batch.prompts is not None:
            self._attend_prompts(batch, flat, size, logits[batch.num_decodes :])
        return logits if batch.logits_index is None else logits[batch.logits_index]

    def _attend_prompts(self, batch: Any, flat: Tensor, size: int, logits: Tensor) -> None:
        """Each way as its kernels see it: squares and packed prompts have their own tokens alone."""
        prompts, plan = batch.prompts, batch.prompts.plan
        own = (batch.token_ids + 1 + TURN * batch.positions)[batch.num_decodes :].float()
        runs = [(w.first + i * w.length, w.length) for w in plan.whole for i in range(w.num)]
        starts = prompts.fresh_start.tolist()
        runs += [(plan.fresh_first + a, b - a) for a, b in pairwise(starts)]
        for first, count in runs:
            for i in range(first, first + count):
                logits[i] = self._logits(own[first : i + 1])
        bounds = pairwise(prompts.bounds.tolist())
        pieces = zip(bounds, prompts.places.tolist(), prompts.firsts.tolist(), prompts.contexts.tolist(), strict=True)
        for (begin, stop), place, first, context in pieces:
            tokens = flat[_slots(prompts.table[place], context, size)]
            for i in range(stop - begin):
                logits[first + i] = self._logits(tokens[: context - (stop - begin) + i + 1])

    def _logits(self, tokens: Tensor) -> Tensor:
        """Logits [V] that every token and its position have a say in."""
        if not tokens.numel():
            return torch.zeros(VOCAB)
        mixed = (tokens.double() * (torch.arange(tokens.numel()) * 7 + 3)).sum()
        if not bool(mixed.isfinite()):
            return torch.full((VOCAB,), float("nan"))
        return ((torch.arange(VOCAB) * 31 + int(mixed) * 17) % 101).float() / 25


def _slots(blocks: Tensor, context: int, size: int) -> Tensor:
    at = torch.arange(context)
    return blocks[at // size].long() * size + at % size


def sample_rows(
    logits: Tensor,
    jobs: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    slots: Tensor,
    logprobs: Tensor | None = None,
) -> Tensor:
    """models.cuda.ops.sample_rows by the definitions of workers.sampling.gumbel, workers.sampling.top_k_top_p and
    workers.sampling.logprobs."""
    table = np.frombuffer(jobs.numpy().tobytes(), JOB)
    noise = NoiseField(logits.shape[1])
    for i, slot in enumerate(slots.tolist()):
        if slot < 0:
            continue
        job, position = table[slot], int(positions[i])
        tokens[i] = NOT_FINITE
        if np.isfinite(float(logits[i].max())):
            tokens[i] = _drawn(ruled_logits_reference(logits[i], job, position).numpy(), job, position, noise)
        if tokens[i] >= 0:
            note_output_reference(job, logits.shape[1], int(tokens[i]))
            if logprobs is not None and job["num_logprobs"] > 0:
                _write_logprobs(logprobs[i], logits[i : i + 1].float().numpy(), tokens[i : i + 1], job["num_logprobs"])
    return tokens


def _write_logprobs(out: Tensor, logits: np.ndarray, token: Tensor, count: int) -> None:
    count = min(int(count), MOST_LOGPROBS, 1 + logits.shape[1])
    found = logprob_row(0, logits, token.numpy(), count - 1)
    ids, values = torch.full((MOST_LOGPROBS,), -1, dtype=torch.int32), torch.full((MOST_LOGPROBS,), -torch.inf)
    ids[:count], values[:count] = torch.from_numpy(found.token_ids[0]), torch.from_numpy(found.logprobs[0])
    out.copy_(torch.cat((torch.from_numpy(found.ranks), ids, values.view(torch.int32))))


def _drawn(row: np.ndarray, job: Any, position: int, noise: NoiseField) -> int:
    best = int(row.argmax())
    peak = float(row[best])
    if not np.isfinite(peak):
        return NOTHING_LEFT
    if job["is_greedy"]:
        return best
    key = noise_key(int(job["seed"]), int(job["choice"]), position)
    temperature = float(job["temperature"])
    if job["top_k"] == 0 and job["top_p"] >= 1.0 and job["min_depth"] == -np.inf:
        return noise.argmax(row, peak, temperature, key)
    ids = np.flatnonzero(row > -np.inf)
    if job["top_k"] > 0 or job["top_p"] < 1.0:
        ids = kept(row, peak, (int(job["top_k"]), float(job["top_p"]), 0.0, temperature))
    ids = ids[row[ids] >= np.float32(peak + float(job["min_depth"]))]
    return argmax_among(ids, row[ids], peak, temperature, key)
