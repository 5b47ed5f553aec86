"""Logits processors applied on the device (csrc/cuda/sampling/logits.cuh), and the record that each sequence with any has there.

Owned by workers.cuda.runner. Which sequences are handled follows from plans alone, so all ranks agree; one that finds no room stays
with the host. A record is made when its sequence is placed, lives as long as it, and counts its outputs on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trireme.models.cuda.ops import (
    ALLOWED,
    BARRED,
    COMPLETES,
    IN_PROMPT,
    LISTED,
    MOST_LOGPROBS,
    MOST_WORD,
    touched_words,
)
from trireme.params import RowParams
from trireme.workers.logits_processors import LogitRules, RuleParts, Tokens
from trireme.workers.sampling.gumbel import Ids

Ints = NDArray[np.int32]
Send = Callable[[Ids, Ints], tuple[Tensor, Tensor]]
"""workers.cuda.steps.Steps.send."""
POOL_BYTES = 160 << 20  # of all records
MOST_POSITION = 2**31 - 1
PAST = MOST_WORD - 1  # tokens of a sequence that its record remembers


def is_for_device(params: RowParams) -> bool:
    """Whether the device can sample for these parameters if it has room for the record: no more log-probabilities than it
    writes, and no bad words longer than it remembers."""
    return params.logprobs < MOST_LOGPROBS and all(len(word) <= MOST_WORD for word in params.bad_token_ids)


@dataclass(frozen=True, slots=True)
class Record:
    """The initial contents of a record: values[i] at word at[i] of `size`, 0 elsewhere."""

    size: int
    num_listed: int
    num_words: int
    at: Ids
    values: Ints


def record_of(parts: RuleParts, past: Tokens, vocab_size: int) -> Record:
    """The layout of csrc/cuda/ops.h; `past` are the sequence's tokens."""
    tokens = np.concatenate([parts.bias_ids, parts.ends])
    last = np.array([word[-1] for word in parts.words], np.int64)
    named = (parts.seen, parts.allowed, parts.masked, last, tokens)
    flags = np.array([0, ALLOWED, BARRED, COMPLETES, LISTED], np.uint32).repeat([ids.size for ids in named])
    flags[: parts.seen.size] = np.where(parts.counts > 0, parts.counts, IN_PROMPT)
    marked, place = np.unique(np.concatenate(named), return_inverse=True)
    marks = np.zeros(marked.size, np.uint32)
    np.bitwise_or.at(marks, place, flags)
    words, starts = np.unique(marked // 32, return_index=True)
    bits = np.uint32(1) << (marked % 32).astype(np.uint32)
    touched = np.bitwise_or.reduceat(bits, starts) if starts.size else bits
    order = np.argsort(tokens, kind="stable")
    biases = np.concatenate([parts.bias, np.full(parts.ends.size, -np.inf, np.float32)])[order]
    listed = np.stack([tokens[order].astype(np.int32), biases.view(np.int32)], axis=1).reshape(-1)
    sequences = [_aligned(word, MOST_WORD) for word in parts.words] + [_aligned(past[-PAST:].tolist(), PAST)]
    rest = np.concatenate([listed, np.array([token for each in sequences for token in each], np.int32)])
    first = touched_words(vocab_size), touched_words(vocab_size) + vocab_size
    return Record(
        size=first[1] + rest.size,
        num_listed=tokens.size,
        num_words=len(parts.words),
        at=np.concatenate([words, first[0] + marked, first[1] + np.arange(rest.size)]),
        values=np.concatenate([touched.view(np.int32), marks.view(np.int32), rest]),
    )


def _aligned(tokens: Sequence[int], width: int) -> list[int]:
    return [-1] * (width - len(tokens)) + [*tokens]


class DeviceRules:
    """As many records as fit into POOL_BYTES."""

    def __init__(self, num_rows: int, vocab_size: int, device: torch.device, *, pool_bytes: int = POOL_BYTES) -> None:
        self.most = min(num_rows, pool_bytes // (4 * (touched_words(vocab_size) + vocab_size)))
        self._vocab_size, self._device = vocab_size, device
        self._rows: set[int] = set()
        self._records: dict[int, Tensor] = {}

    def __contains__(self, row: int) -> bool:
        return row in self._rows

    def admit(self, row: int) -> bool:
        """Allocates a record for the sequence in slot `row`; False if there is no room."""
        if len(self._rows) >= self.most:
            return False
        self._rows.add(row)
        return True

    def drop(self, row: int) -> None:
        """Frees a slot's record. Steps in flight may still read it: the memory is reused only by later work of the stream."""
        self._rows.discard(row)
        self._records.pop(row, None)

    def write(self, jobs: NDArray[Any], rules: dict[int, tuple[int, LogitRules, Tokens]], send: Send) -> None:
        """Writes records; rules[i] are the slot that jobs[i] is about, its logits processors, and its tokens."""
        records = [record_of(each.parts(), tokens, self._vocab_size) for _, each, tokens in rules.values()]
        sizes = [record.at.size for record in records]
        at, values = send(np.concatenate([r.at for r in records]), np.concatenate([r.values for r in records]))
        sent = zip(records, at.long().split(sizes), values.split(sizes), strict=True)
        for (i, (row, each, _)), (record, places, words) in zip(rules.items(), sent, strict=True):
            made = torch.zeros(record.size, dtype=torch.int32, device=self._device).index_copy_(0, places, words)
            self._records[row] = made
            job = jobs[i]
            job["record"], job["num_listed"], job["num_words"] = made.data_ptr(), record.num_listed, record.num_words
            job["only_allowed"], job["ends_from"] = each.has_allowed, min(each.ends_from, MOST_POSITION)

    def count(self, row: int, token: int) -> None:
        """Counts a token that the host has sampled."""
        record = self._records.get(row)
        if record is None:
            return
        record[touched_words(self._vocab_size) + token] += 1
        record[token // 32] |= int(np.uint32(1 << token % 32).view(np.int32))
        record[-PAST:-1] = record[1 - PAST :].clone()
        record[-1] = token
