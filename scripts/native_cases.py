"""Native hot paths for scripts/count_instructions.py: a decode step of a small synthetic model and a call of the sampler.

One thread, so that none spins; weights, KV and logits come from a fixed seed, so that every run does the same.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from tests.models.rows import new_row, plan_of
from trireme.model.spec import ArchSpec
from trireme.models.cpu.native_stage import NativeDecoder
from trireme.models.forward import HostBatch, SoloGroup
from trireme.models.load import no_progress
from trireme.models.native import load_native
from trireme.models.weights.packed import Floats, quantize_rows
from trireme.models.weights.sources import RawMatrix
from trireme.params import RowParams
from trireme.topology.mesh import Mesh
from trireme.workers.batch import Batch
from trireme.workers.kv.tensors import KV_DTYPES, allocate_kv
from trireme.workers.sampling.sampler import Sampler

ARCH = ArchSpec(
    family="llama", num_layers=3, hidden=256, num_heads=8, num_kv_heads=4, head_dim=32, ffn=512, vocab_size=1024,
    max_position=256, tie_embeddings=True,
)  # fmt: skip
ROWS, CONTEXT, BLOCK, VOCAB = 4, 100, 16, 8192
SETTINGS = (
    RowParams(9, temperature=0.0),
    RowParams(9, temperature=0.8, seed=1),
    RowParams(9, temperature=0.8, top_k=50, top_p=0.95, seed=2),
    RowParams(9, temperature=0.7, repetition_penalty=1.1, frequency_penalty=0.2, logprobs=3, seed=3),
)


class _Made:
    """Weights from a seed, in Q4_0 blocks."""

    path = Path("made up")

    def __init__(self) -> None:
        self._dice = np.random.default_rng(5)

    def names(self) -> set[str]:
        return set()

    def matrix(self, name: str, n: int, k: int) -> RawMatrix:
        values = self._dice.standard_normal((n, k)).astype(np.float32) / np.float32(k**0.5)
        return RawMatrix(*quantize_rows("q4_0", values), n, k)

    def vector(self, name: str, size: int) -> Floats:
        return np.ones(size, np.float32)


def decode(isa: str, num_steps: int) -> None:
    """Decode steps of 4 sequences with kernels of one instruction set, after one for warm-up."""
    native = load_native()
    native.set_num_threads(1)
    native.set_isa(isa)
    model = NativeDecoder(ARCH, Mesh(1, 1, 1), SoloGroup(), _Made(), progress=no_progress, max_len=256)
    width = -(-(CONTEXT + 30) // BLOCK)
    kv = allocate_kv(model, ROWS * width, BLOCK, KV_DTYPES["float16"])
    for layer in kv:
        layer.k[:] = layer.v[:] = np.float16(0.25)
    for step in range(1 + num_steps):
        model.forward(_batch(CONTEXT + step, width), kv)


def _batch(at: int, width: int) -> HostBatch:
    """A batch in which every sequence computes the token at position `at`."""
    rows = np.arange(ROWS, dtype=np.int32)
    table = np.arange(ROWS * width, dtype=np.int32).reshape(ROWS, width)
    return HostBatch(
        token_ids=rows * 7 + 1,
        positions=np.full(ROWS, at, np.int32),
        slots=table[:, at // BLOCK] * BLOCK + at % BLOCK,
        query_start=np.arange(ROWS + 1, dtype=np.int32),
        context_len=np.full(ROWS, at + 1, np.int32),
        block_table=table,
        logits_index=rows,
        choices=rows * 0,
        num_prompt=np.full(ROWS, CONTEXT, np.int32),
    )


def sample(times: int) -> None:
    """20 calls for 16 sequences with common parameters, over 8192 tokens."""
    load_native().set_num_threads(1)
    count = 16
    batch = Batch(count, 64, 8, VOCAB, 64)
    batch.apply(plan_of(new=[new_row(i, [3, 1, 4, 1, 5, i], SETTINGS[i % 4]) for i in range(count)]))
    logits = (np.random.default_rng(7).standard_normal((count, VOCAB)) * 2).astype(np.float32)
    sampler = Sampler(VOCAB)
    for _ in range(3 + 20 * times):
        sampler.sample(logits, np.arange(count), batch)
