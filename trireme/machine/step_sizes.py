"""Sizes of steps with prompt tokens that GPU workers capture as CUDA graphs, and what a step is padded to. Pure; used by
workers.cuda.graph_sizes, and by the engine core, which plans chunks that leave little padding.

A captured size is (decoding sequences, prompt tokens). Beside a few prompt tokens, the sizes fill whole tiles of TILE rows: a GEMM
takes as long for a part of one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

TILE = 128  # rows of a GEMM's tile
TOTALS = (128, 192, 256, 320, 384, 512)  # tokens of captured steps; larger ones are launched kernel by kernel
MOST_CAPTURED = TOTALS[-1]
FEW_TOKENS = 32  # prompt tokens for which there is a captured size of its own
DECODES = (0, 8, 16, 32, 64, 128, 256)
LEAST_KEPT = 0.75  # chunks are cut to whole tiles unless less than this share is left


def padded_decodes(max_rows: int, sizes: Iterable[int] = DECODES) -> tuple[int, ...]:
    """Decoding sequences of the captured sizes, ascending, for batches of `max_rows`."""
    sizes = sorted(sizes)
    return (*(count for count in sizes if count < max_rows), min(max_rows, sizes[-1]))


def prompt_tokens(decodes: int) -> list[int]:
    """Prompt tokens of the captured sizes with `decodes` decoding sequences, ascending."""
    filling = (total - decodes for total in TOTALS)
    return [FEW_TOKENS, *(count for count in filling if count > FEW_TOKENS)]


class StepSizes:
    """What a step with prompt tokens computes when `decodes` are those of padded_decodes; empty: nothing is padded."""

    def __init__(self, decodes: Sequence[int]) -> None:
        self._decodes = decodes

    def computed(self, rows: int, prompt: int) -> int:
        """Tokens computed for `rows` decoding sequences and `prompt` > 0 prompt tokens, padding included."""
        decodes = self._padded(rows)
        if decodes is None or decodes + prompt > MOST_CAPTURED:
            return rows + prompt
        if prompt <= FEW_TOKENS:
            return decodes + FEW_TOKENS
        return TOTALS[bisect_left(TOTALS, decodes + prompt)]

    def filling(self, rows: int, prompt: int) -> tuple[int, int]:
        """The most prompt tokens up to `prompt` that fill whole tiles beside `rows` decoding sequences (0: no such number), and
        the fewest from `prompt` on."""
        decodes = self._padded(rows)
        if decodes is None or decodes + prompt > MOST_CAPTURED:
            fewer = (rows + prompt) // TILE * TILE - rows
            more = fewer if fewer == prompt else fewer + TILE
            if decodes is not None and decodes + fewer <= MOST_CAPTURED:
                fewer = MOST_CAPTURED - decodes
            return max(fewer, 0), more
        place = bisect_left(TOTALS, decodes + prompt)
        more = TOTALS[place] - decodes
        return (prompt if more == prompt else max(0, TOTALS[place - 1] - decodes) if place else 0), more

    def _padded(self, rows: int) -> int | None:
        for decodes in self._decodes:
            if decodes >= rows:
                return decodes
        return None


def usual_rows(most: int) -> list[int]:
    """Sizes up to `most` whose GEMMs are likely to use each kernel that a step may need: whole tiles, then powers of two."""
    tiles = range(TILE, min(most, 16 * TILE) + 1, TILE)
    return [*tiles, *(1 << power for power in range(12, most.bit_length()) if 1 << power <= most)]
