"""Step sizes captured as CUDA graphs: the initial ones, and those that may be added. Pure; used by
workers.cuda.worker.

Few are captured at the start. Decode steps may then be padded to nearly twice their batch size, which costs little: their time is
that of reading the weights. Prompts cost what they are padded to, so their list (trireme.machine.step_sizes) is complete from the
start.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from trireme.machine.graph_sizes import GraphSizes
from trireme.machine.step_sizes import DECODES, padded_decodes, prompt_tokens
from trireme.workers.cuda.graph_policy import GraphPolicy, Size

MOST_ROWS = 512  # larger steps are long enough to be launched kernel by kernel
MORE_DECODES = (0, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)  # decoding sequences beside prompts
MOST_GRAPHS, MOST_MIXED = 40, 44  # captured sizes of each kind


def sizes_up_to(max_rows: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 256, every 32 beyond; the last one is max_rows (MOST_ROWS at most)."""
    most = min(max_rows, MOST_ROWS)
    usual = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, MOST_ROWS + 1, 32)]
    return [*(size for size in usual if size < most), most]


def first_sizes(max_rows: int) -> list[int]:
    """Powers of two, and max_rows (MOST_ROWS at most)."""
    most = min(max_rows, MOST_ROWS)
    return [*(1 << i for i in range(10) if 1 << i < most), most]


def mixed_sizes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """(decoding sequences, prompt tokens) of small steps, for batches of `max_rows` and steps of `max_tokens`."""
    return _mixed(DECODES, max_rows, max_tokens)


def decode_policy(asked: GraphSizes, max_rows: int) -> GraphPolicy:
    """The policy of decode steps. Sizes named by the user stay fixed."""
    if not asked.adapts:
        return fixed((size,) for size in asked.named)
    grid = [(size,) for size in sizes_up_to(max_rows)]
    return GraphPolicy([(size,) for size in first_sizes(max_rows)], grid, most=min(MOST_GRAPHS, len(grid)))


def mixed_policy(asked: GraphSizes, max_rows: int, max_tokens: int) -> GraphPolicy:
    """The policy of small steps with prompts, beside as many sequences as the largest named size has."""
    if not asked.adapts:
        return fixed(mixed_sizes(max(asked.named), max_tokens) if asked.named else ())
    grid = _mixed(MORE_DECODES, max_rows, max_tokens)
    return GraphPolicy(mixed_sizes(max_rows, max_tokens), grid, most=MOST_MIXED)


def fixed(sizes: Iterable[Size]) -> GraphPolicy:
    """Exactly these sizes."""
    return GraphPolicy(sizes)


def _mixed(decodes: Sequence[int], max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    rows = padded_decodes(max_rows, decodes)
    return [(count, more) for count in rows for more in prompt_tokens(count) if count + more <= max_tokens]
