"""CUDA graphs of decode steps, one for each padded number of rows (and for how finely contexts are cut), captured at the start.

Used by workers.gpu_runner. A step is padded up to the next captured size; all graphs share one memory pool and one place for
their inputs. On the CPU (tests) the same steps run as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workers.batch import Batch
from workers.gpu_rows import DeviceRows, Indices, Ints
from workers.gpu_steps import COLUMNS, SHORT, Steps, fill_decode
from workers.inputs import StepRows
from workers.staging import Upload

Progress = Callable[[str, int, int], None]
MOST_ROWS = 512  # beyond it a step is long enough to be launched kernel by kernel


def sizes_up_to(max_rows: int) -> list[int]:
    """1, 2, 4, then every 8 up to 64, every 16 up to 256, every 32 beyond; the last one is max_rows (MOST_ROWS at most)."""
    most = min(max_rows, MOST_ROWS)
    usual = [1, 2, 4, *range(8, 65, 8), *range(80, 257, 16), *range(288, MOST_ROWS + 1, 32)]
    return [*(size for size in usual if size < most), most]


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

    def capture(self, progress: Progress) -> None:
        """Captures every size, the largest first, so that the smaller ones fit into its memory."""
        wanted = [
            (size, splits)
            for size in reversed(self.sizes)
            for splits in sorted({self._steps.splits(size, SHORT), self._steps.splits(size, SHORT + 1)})
        ]
        pool = torch.cuda.graph_pool_handle() if self._device.type == "cuda" else None
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

        if self._device.type != "cuda":
            return launch
        self._pad(inputs)
        launch()  # kernels are loaded and products chosen before anything is recorded
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            launch()
        return graph.replay

    def _pad(self, inputs: Tensor) -> None:
        """Rows of padding only."""
        rows = self._steps.rows
        values = {"rows": rows.padding, "slots": -1, "jobs": -1, "at": rows.nowhere}
        for column, name in zip(inputs, COLUMNS, strict=True):
            column.fill_(values.get(name, 0))
