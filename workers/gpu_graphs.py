"""CUDA graphs of steps, captured at the start: decode steps, one for each padded number of rows (and for how finely contexts are
cut), and small steps with prompts, one for each padded number of decoding rows and of prompt tokens.

Used by workers.gpu_runner. A step is padded up to the next captured size; all graphs share one memory pool, and those of a kind
one place for their inputs. On the CPU (tests) the same steps run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from models.attention.prompt_plan import PIECES, plan_prompts
from workers.batch import Batch
from workers.gpu_rows import DeviceRows, Indices, Ints
from workers.gpu_steps import COLUMNS, MIXED, SHORT, Mixed, Steps, fill_decode
from workers.inputs import StepRows
from workers.staging import Upload

Progress = Callable[[str, int, int], None]
MOST_ROWS = 512  # beyond it a step is long enough to be launched kernel by kernel
DECODES = (0, 8, 32, 64, 128, 256)  # rows beside prompts
PROMPT_TOKENS = (32, 128, 256, 512)
MOST_PIECES = 32
MOST_CHANGES = 128  # block-table entries in a step; more go ahead of it


def sizes_up_to(max_rows: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 256, every 32 beyond; the last one is max_rows (MOST_ROWS at most)."""
    most = min(max_rows, MOST_ROWS)
    usual = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, MOST_ROWS + 1, 32)]
    return [*(size for size in usual if size < most), most]


def mixed_sizes(max_rows: int, max_tokens: int) -> list[tuple[int, int]]:
    """(decoding rows, prompt tokens) of small steps, for batches of `max_rows` and steps of `max_tokens`."""
    rows = [*(count for count in DECODES if count < max_rows), min(max_rows, DECODES[-1])]
    return [(decodes, tokens) for decodes in rows for tokens in PROMPT_TOKENS if decodes + tokens <= max_tokens]


class DecodeGraphs:
    """Decode steps of up to `sizes[-1]` rows; without sizes, none."""

    def __init__(self, steps: Steps, sizes: list[int]) -> None:
        self.sizes = sizes
        self._steps, self._device = steps, steps.device
        most = self._most = max(sizes, default=0)
        self._upload = Upload(len(COLUMNS) * most, steps.device)
        self._inputs = torch.zeros(len(COLUMNS) * most, dtype=torch.int32, device=steps.device)
        self._tokens = torch.zeros(most, dtype=torch.int32, device=steps.device)
        self._launch: dict[tuple[int, int], Callable[[], Any]] = {}
        self.num_padded = 0  # rows computed for nobody so far

    def capture(self, progress: Progress, pool: Any = None) -> None:
        """Captures every size, the largest first, so that the smaller ones fit into its memory."""
        wanted = [
            (size, splits)
            for size in reversed(self.sizes)
            for splits in sorted({self._steps.splits(size, SHORT), self._steps.splits(size, SHORT + 1)})
        ]
        for done, key in enumerate(wanted):
            progress("graphs", done, len(wanted))
            self._launch[key] = self._captured(*key, pool)
        progress("graphs", len(wanted), len(wanted))

    def fits(self, num_rows: int) -> bool:
        return 0 < num_rows <= self._most

    def run(self, batch: Batch, step: StepRows, changes: tuple[Indices, Ints], rows: DeviceRows) -> Tensor:
        """Launches the step; the tokens [R] it samples are valid until the next one is launched."""
        count = step.rows.size
        size = next(size for size in self.sizes if size >= count)
        if changes[0].size > size:
            self._steps.change_blocks(changes)
            changes = changes[0][:0], changes[1][:0]
        host = self._upload.take(len(COLUMNS) * size)
        fill_decode(host.reshape(len(COLUMNS), size), batch, step, changes, rows)
        self._upload.send(host.size, self._inputs[: host.size])
        self.num_padded += size - count
        self._launch[size, self._steps.splits(size, int(step.num_computed.max()) + 1)]()
        return self._tokens[:count]

    def _captured(self, size: int, splits: int, pool: Any) -> Callable[[], Any]:
        inputs = self._inputs[: len(COLUMNS) * size].view(len(COLUMNS), size)
        tokens = self._tokens[:size]

        def launch() -> None:
            self._steps.decode(inputs, tokens, splits)

        if self._device.type == "cuda":
            self._pad(inputs)
        return captured(launch, self._device, pool)

    def _pad(self, inputs: Tensor) -> None:
        """Rows of padding only."""
        rows = self._steps.rows
        values = {"rows": rows.padding, "slots": -1, "jobs": -1, "at": rows.nowhere}
        for column, name in zip(inputs, COLUMNS, strict=True):
            column.fill_(values.get(name, 0))


class MixedGraphs:
    """Small steps with prompts: a first token is there after one launch. All that is read back goes through pieces."""

    def __init__(self, steps: Steps, sizes: list[tuple[int, int]]) -> None:
        self._steps, self._device, self.sizes = steps, steps.device, sizes
        most = max((_size(*size) for size in sizes), default=0)
        self._upload = Upload(most, steps.device)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=steps.device)
        rows = max((decodes for decodes, _ in sizes), default=0)
        self._tokens = torch.zeros(rows + MOST_PIECES, dtype=torch.int32, device=steps.device)
        self._launch: dict[tuple[int, int], Callable[[], Any]] = {}
        self.num_padded = 0  # tokens computed for nobody so far

    def capture(self, progress: Progress, pool: Any = None) -> None:
        """Captures every size, the largest first."""
        for done, key in enumerate(sorted(self.sizes, key=sum, reverse=True)):
            progress("prompt graphs", done, len(self.sizes))
            self._launch[key] = self._captured(*key, pool)
        progress("prompt graphs", len(self.sizes), len(self.sizes))

    def size_for(self, step: StepRows) -> tuple[int, int] | None:
        """The captured size of a step, if there is one."""
        decodes = int((step.num_tokens == 1).sum())
        tokens = int(step.num_tokens.sum()) - decodes
        if not tokens or step.rows.size - decodes > MOST_PIECES:
            return None
        fit = (size for size in self.sizes if decodes <= size[0] and tokens <= size[1] and size in self._launch)
        return min(fit, key=sum, default=None)

    def run(self, size: tuple[int, int], step: Mixed) -> Tensor:
        """Launches a step whose plan has pieces only; the tokens [S] it samples are valid until the next one is launched."""
        at, blocks = step.columns[-2:]
        if at.size > MOST_CHANGES:
            self._steps.change_blocks((at, blocks))
            step.columns[-2:] = [at[:0], blocks[:0]]
        host = self._upload.take(_size(*size))
        fill_mixed(host, size, step, self._steps.rows)
        self._upload.send(host.size, self._inputs[: host.size])
        self.num_padded += sum(size) - step.columns[0].size
        self._launch[size]()
        return self._tokens[: step.columns[MIXED.index("asking")].size]

    def _captured(self, decodes: int, tokens: int, pool: Any) -> Callable[[], Any]:
        widths = _widths(decodes, tokens)
        inputs = self._inputs[: sum(widths)]
        parts = inputs.split(widths)
        splits = self._steps.splits(decodes, SHORT + 1)
        sampled = self._tokens[: decodes + MOST_PIECES]

        def launch() -> None:
            self._steps.launch_mixed(parts, PADDED, sampled, splits, most_queries=tokens)

        if self._device.type == "cuda":
            host = np.empty(inputs.numel(), np.int32)
            fill_mixed(host, (decodes, tokens), EMPTY, self._steps.rows)
            inputs.copy_(torch.from_numpy(host))
        return captured(launch, self._device, pool)


PADDED = plan_prompts(np.full(MOST_PIECES, 2, np.int32), np.zeros(MOST_PIECES, np.int32), PIECES)
"""The plan of a graph: so many pieces, whose sizes are known on the device alone."""
EMPTY = Mixed(0, 0, PADDED, [np.zeros(int(name in ("bounds", "fresh")), np.int32) for name in MIXED])


def captured(launch: Callable[[], Any], device: torch.device, pool: Any) -> Callable[[], Any]:
    """`launch` as a graph; on a CPU as it is."""
    if device.type != "cuda":
        return launch
    launch()  # kernels are loaded and products chosen before anything is recorded
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        launch()
    return graph.replay


def graph_pool(device: torch.device) -> Any:
    """Memory that graphs share, since only one of them runs at a time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _widths(decodes: int, tokens: int) -> list[int]:
    """Of the columns of MIXED in a graph."""
    pieces, asking = MOST_PIECES, decodes + MOST_PIECES
    return [
        *([decodes + tokens] * 3),
        *([decodes] * 2),
        *(pieces, pieces, pieces + 1, pieces, 1),
        *([asking] * 4),
        *([MOST_CHANGES] * 2),
    ]


def _size(decodes: int, tokens: int) -> int:
    return sum(_widths(decodes, tokens))


def fill_mixed(out: Ints, size: tuple[int, int], step: Mixed, rows: DeviceRows) -> None:
    """Writes the columns of `step` into `out`, padded to `size`: padding decodes nothing, has no pieces, samples nothing."""
    padding = {
        "slots": -1,
        "rows": rows.padding,
        "places": rows.padding,
        "asking": rows.padding,
        "jobs": -1,
        "at": rows.nowhere,
    }
    places = np.split(out, np.cumsum(_widths(*size))[:-1])
    shift = size[0] - step.num_decodes
    for name, place, column in zip(MIXED, places, step.columns, strict=True):
        place[:] = padding.get(name, 0)
        if name in MIXED[:3]:
            place[: step.num_decodes] = column[: step.num_decodes]
            place[size[0] : size[0] + column.size - step.num_decodes] = column[step.num_decodes :]
        elif name == "bounds":
            place[: column.size], place[column.size :] = column, column[-1]
        elif name == "last":
            place[: column.size] = column + shift * (column >= step.num_decodes)
        else:
            place[: column.size] = column
