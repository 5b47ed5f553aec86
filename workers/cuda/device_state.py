"""Batch state on the GPU between steps: block tables, newest token and sampling job of every batch slot.

Owned by workers.cuda.runner. The host's batch (workers.batch) is authoritative; the device receives differences. One slot beyond
the batch is padding: it holds no request, and absorbs the writes of padded steps.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.models.cuda.ops import JOB
from trireme.params import RowParams
from trireme.transport.wire.columns import unpack
from trireme.transport.wire.messages import StepPlan
from trireme.workers.batch import Batch

Ints = NDArray[np.int32]
Indices = NDArray[np.int64]


class DeviceRows:
    """Tables of num_rows + 1 slots on `device`."""

    def __init__(self, num_rows: int, max_blocks: int, device: torch.device) -> None:
        self.padding = num_rows
        self.blocks = torch.zeros(num_rows + 1, max_blocks, dtype=torch.int32, device=device)
        self.last_token = torch.zeros(num_rows + 1, dtype=torch.int32, device=device)
        greedy = np.zeros((), JOB)
        greedy["is_greedy"] = 1
        job = torch.from_numpy(np.frombuffer(greedy.tobytes(), np.uint8).copy())
        self.jobs = job.repeat(num_rows + 1, 1).to(device)

    @property
    def nowhere(self) -> int:
        """An index of the flat block table that is never read."""
        return self.padding * self.blocks.shape[1]

    def write_blocks(self, at: Tensor, blocks: Tensor) -> None:
        """Writes blocks[i] at index at[i] (slot * max_blocks + index) of the flat table."""
        self.blocks.view(-1).index_copy_(0, at.long(), blocks)

    def newest(self, rows: Tensor, known: Tensor) -> Tensor:
        """The tokens that slots `rows` compute: `known` from the host, or where that is < 0 the token sampled here."""
        return torch.where(known < 0, self.last_token.index_select(0, rows), known)

    def keep(self, rows: Tensor, tokens: Tensor) -> None:
        """Stores newly sampled tokens of slots `rows`."""
        self.last_token.index_copy_(0, rows.long(), tokens)


def block_changes(plan: StepPlan, batch: Batch) -> tuple[Indices, Ints]:
    """Changes of the device's flat block table (indices and new values) by `plan`, which the batch has already applied."""
    width = batch.blocks.shape[1]
    parts = [_span(batch, new.row, 0) for new in plan.new]
    grown = unpack(plan.grown_rows).astype(np.int64)
    if grown.size:
        counts = dict.fromkeys(grown.tolist(), 0)
        if len(counts) == grown.size:
            at = batch.num_blocks[grown].astype(np.int64) - 1
            sound = at >= 0  # a sequence that could not be placed has none
            grown, at = grown[sound], at[sound]
            parts.append((grown * width + at, batch.blocks[grown, at]))
        else:
            for row in grown.tolist():
                counts[row] += 1
            parts += [_span(batch, row, int(batch.num_blocks[row]) - count) for row, count in counts.items()]
    if not parts:
        return np.zeros(0, np.int64), np.zeros(0, np.int32)
    return np.concatenate([at for at, _ in parts]), np.concatenate([blocks for _, blocks in parts])


def _span(batch: Batch, row: int, start: int) -> tuple[Indices, Ints]:
    stop = int(batch.num_blocks[row])
    return row * batch.blocks.shape[1] + np.arange(max(start, 0), stop), batch.blocks[row, max(start, 0) : stop]


def job_of(params: RowParams, vocab_size: int) -> NDArray[Any]:
    """A sequence's parameters as the device sampler takes them, without logits processors (workers.cuda.logits_processors)."""
    job = np.zeros((), JOB)
    job["seed"] = params.seed & (2**64 - 1)
    job["choice"] = params.choice
    job["temperature"] = params.temperature if not params.is_greedy else 1.0
    job["top_p"] = params.top_p
    job["min_depth"] = params.temperature * math.log(params.min_p) if params.min_p > 0 else -math.inf
    job["top_k"] = params.top_k if 0 < params.top_k < vocab_size else 0
    job["is_greedy"] = params.is_greedy
    job["repetition_penalty"] = params.repetition_penalty
    job["frequency_penalty"] = params.frequency_penalty
    job["presence_penalty"] = params.presence_penalty
    job["num_logprobs"] = 1 + min(params.logprobs, vocab_size)
    return job
