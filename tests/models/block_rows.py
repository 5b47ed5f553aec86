"""Rows of GGUF's blocks for tests: every code and scale, and factors that are sound numbers."""

from __future__ import annotations

import numpy as np

from trireme.models.weights.packed import BLOCKS, Bytes, row_bytes

FACTORS = {
    **{"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q8_0": (0,), "Q4_0": (0,), "Q4_1": (0, 2)},
    **{"Q5_0": (0,), "Q5_1": (0, 2), "IQ4_NL": (0,)},
}  # where the float16 of a block lie


def block_rows(kind: str, n: int, k: int, seed: int = 0) -> Bytes:
    """Random raw rows, uint8 [n, row bytes], of values near 1."""
    generator = np.random.default_rng(seed)
    size, nbytes = BLOCKS[kind]
    blocks = generator.integers(0, 256, (n * k // size, nbytes), dtype=np.uint8)
    least = 1e-4 if kind.endswith("K") else 1e-2
    for at in FACTORS[kind]:
        factor = (generator.random((len(blocks), 1)) * 9 + 1) * least * (1 if kind != "Q8_0" else 0.1)
        blocks[:, at : at + 2] = factor.astype(np.float16).view(np.uint8)
    return blocks.reshape(n, row_bytes(kind, k))
