"""CUDA graphs of steps: decode steps, one per padded batch size (and per number of context splits), and small steps with
prompts, one per padded number of decoding sequences and of prompt tokens.

Used by workers.cuda.runner, and by workers.cuda.graph_adapt, which changes what is captured. A step is padded to the smallest
captured size that covers it; all graphs share one memory pool, and those of a kind one input buffer. On the CPU (tests) the
same steps run uncaptured.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trireme.machine.memory_budget import GPU_GRAPHS
from trireme.models.cuda.attention.prefill_plan import PIECES, plan_prompts
from trireme.workers.batch import Batch
from trireme.workers.cuda.device_state import DeviceRows, Indices, Ints
from trireme.workers.cuda.graph_policy import GraphPolicy, Size
from trireme.workers.cuda.staging import Upload
from trireme.workers.cuda.steps import (
    COLUMNS,
    SHORT,
    STEP_COLUMNS,
    PrefillDecodeStep,
    Steps,
    drawn_tensors,
    fill_decode,
)
from trireme.workers.inputs import StepRows

Progress = Callable[[str, int, int], None]
Launch = Callable[[], Any]
Drawn = tuple[Tensor, Tensor]
MOST_PIECES = 32
MOST_CHANGES = 128  # block-table entries in a step; more are written ahead of it
TIMED = 3  # replays
LATELY = 16  # captures


class GraphMemory:
    """The pool that all graphs share, and the cost of captures, measured around each.

    The pool is as large as the largest graphs need, and shrinks only when no graph is left; a dropped graph frees what the driver
    holds for it. `most_bytes` is the limit for all; the largest graphs, which are mandatory, leave at least a quarter of it to
    the others.
    """

    def __init__(self, device: torch.device, most_bytes: int = GPU_GRAPHS) -> None:
        self._is_real = device.type == "cuda"
        self._most_bytes = most_bytes
        self.pool = graph_pool(device)
        self.held = 0  # bytes of GPU memory, pool included
        self.base = 0  # those of the largest graph of each kind
        self.growth = 0  # the most that any other size took
        self._times: list[float] = []  # of the other captures: the first ones load kernels

    @property
    def most_bytes(self) -> int:
        return max(self._most_bytes, self.base + self._most_bytes // 4)

    @property
    def capture_s(self) -> float:
        """Seconds to capture a size."""
        return sum(self._times) / max(1, len(self._times))

    @property
    def has_room(self) -> bool:
        """Whether one more size fits."""
        return self.held + self.growth <= self.most_bytes

    def note(self, seconds: float, taken: int, *, is_largest: bool) -> None:
        """Records the capture of a size: `is_largest` of its kind, or another one."""
        if is_largest:
            self.base += taken
            return
        self.growth = max(self.growth, taken)
        self._times = [*self._times, seconds][-LATELY:]

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measures the memory of graphs around a change."""
        before = self._free_now()
        yield
        self.held = max(0, self.held + before - self._free_now())

    def _free_now(self) -> int:
        if not self._is_real:
            return 0
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info()[0]


class GraphSet:
    """The graphs of one kind of step: per size, those of its variants. `make` captures all variants of a size."""

    def __init__(self, policy: GraphPolicy, memory: GraphMemory, make: Callable[[Size], Mapping[int, Launch]]) -> None:
        self.policy = policy
        self.launches: dict[Size, Mapping[int, Launch]] = {}
        self._memory, self._make = memory, make
        self.num_captured = self.num_dropped = self.num_replays = 0
        self.num_padded = 0  # padding computed so far

    def capture_all(self, phase: str, progress: Progress, *, leaves_out: bool = False) -> list[Size]:
        """Captures the policy's initial sizes, largest first, so that the smaller ones fit into its memory. With `leaves_out`,
        optional sizes that do not fit into memory are skipped; returns those."""
        wanted, left_out = self.policy.captured[::-1], list[Size]()
        for done, size in enumerate(wanted):
            progress(phase, done, len(wanted))
            if leaves_out and size not in self.policy.kept and not self._memory.has_room:
                self.policy.drop(size)
                left_out.append(size)
            else:
                self._capture(size, is_largest=done == 0)
        progress(phase, len(wanted), len(wanted))
        return left_out

    def add(self, size: Size) -> None:
        """Captures one more size. Nothing may be in flight on the device."""
        self._capture(size)
        self.policy.add(size)

    def drop(self, size: Size, *, held: int | None = None) -> None:
        """Drops a size; see GraphPolicy.drop. Nothing may be in flight on the device."""
        with self._memory.measured():
            del self.launches[size]
        self.policy.drop(size, held=held)
        self.num_dropped += 1

    def replay(self, size: Size, variant: int, num_padded: int) -> None:
        self.num_replays += 1
        self.num_padded += num_padded
        self.launches[size][variant]()

    def _capture(self, size: Size, *, is_largest: bool = False) -> None:
        began, memory, before = time.perf_counter(), self._memory, self._memory.held
        self.launches[size] = self._make(size)
        memory.note(time.perf_counter() - began, memory.held - before, is_largest=is_largest)
        self.num_captured += 1


class DecodeGraphs:
    """Decode steps of up to the largest batch size of `policy`; without sizes, none."""

    def __init__(self, steps: Steps, policy: GraphPolicy, memory: GraphMemory) -> None:
        self._steps, self._device, self._memory = steps, steps.device, memory
        most = max((rows for (rows,) in policy.grid), default=0)
        self._upload = Upload(len(COLUMNS) * most, steps.device)
        self._inputs = torch.zeros(len(COLUMNS) * most, dtype=torch.int32, device=steps.device)
        self._tokens, self._logprobs = drawn_tensors(most, steps.device)
        self.set = GraphSet(policy, memory, self._captured)

    def run(self, size: Size, batch: Batch, step: StepRows, changes: tuple[Indices, Ints], rows: DeviceRows) -> Drawn:
        """Launches the step; its sampled tokens [R] and their log-probabilities are valid until the next launch."""
        count, (most,) = step.rows.size, size
        if changes[0].size > most:
            self._steps.change_blocks(changes)
            changes = changes[0][:0], changes[1][:0]
        host = self._upload.take(len(COLUMNS) * most)
        fill_decode(host.reshape(len(COLUMNS), most), batch, step, changes, rows)
        self._upload.send(host.size, self._inputs[: host.size])
        self.set.replay(size, self._steps.splits(most, int(step.num_computed.max()) + 1), most - count)
        return self._tokens[:count], self._logprobs[:count]

    def seconds_per_row(self) -> float:
        """Seconds per padded slot, from empty steps of the smallest and the largest size; 0 where that is unknown."""
        sizes = self.set.policy.captured
        if self._device.type != "cuda" or len(sizes) < 2:
            return 0.0
        (least,), (most,) = sizes[0], sizes[-1]
        return max(0.0, (self._time(most) - self._time(least)) / (most - least))

    def _time(self, rows: int) -> float:
        launch = next(iter(self.set.launches[(rows,)].values()))
        self._pad(self._inputs_of(rows))
        launch()
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(TIMED):
            launch()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / TIMED

    def _captured(self, size: Size) -> Mapping[int, Launch]:
        (rows,) = size
        inputs, drawn = self._inputs_of(rows), (self._tokens[:rows], self._logprobs[:rows])
        if self._device.type == "cuda":
            self._pad(inputs)
        found: dict[int, Launch] = {}
        for longest in (SHORT, SHORT + 1):
            splits = self._steps.splits(rows, longest)
            if splits not in found:
                found[splits] = self._capture_one(inputs, drawn, splits)
            elif self._device.type == "cuda" and self._steps.num_ranks > 1:
                self._decode(inputs, drawn, splits)  # a rank with fewer heads launches the other variant now
        return found

    def _capture_one(self, inputs: Tensor, drawn: Drawn, splits: int) -> Launch:
        memory = self._memory
        return captured(lambda: self._decode(inputs, drawn, splits), self._device, memory.pool, memory.measured())

    def _decode(self, inputs: Tensor, drawn: Drawn, splits: int) -> None:
        tokens, logprobs = drawn
        self._steps.decode(inputs, tokens, splits, logprobs)

    def _inputs_of(self, rows: int) -> Tensor:
        return self._inputs[: len(COLUMNS) * rows].view(len(COLUMNS), rows)

    def _pad(self, inputs: Tensor) -> None:
        """Fills the inputs with padding."""
        rows = self._steps.rows
        values = {"rows": rows.padding, "slots": -1, "jobs": -1, "at": rows.nowhere}
        for column, name in zip(inputs, COLUMNS, strict=True):
            column.fill_(values.get(name, 0))


class MixedGraphs:
    """Small steps with prompts, so that a first token takes a single launch. Prompts read the cache through pieces only."""

    def __init__(self, steps: Steps, policy: GraphPolicy, memory: GraphMemory) -> None:
        self._steps, self._device, self._memory = steps, steps.device, memory
        most = max((_size(*size) for size in policy.grid), default=0)
        self._upload = Upload(most, steps.device)
        self._inputs = torch.zeros(most, dtype=torch.int32, device=steps.device)
        rows = max((decodes for decodes, _ in policy.grid), default=0)
        self._tokens, self._logprobs = drawn_tensors(rows + MOST_PIECES, steps.device)
        self.set = GraphSet(policy, memory, self._captured)

    def run(self, size: Size, step: PrefillDecodeStep) -> Drawn:
        """Launches a step whose plan has only pieces; its sampled tokens [S] and their log-probabilities are valid until the next
        launch."""
        at, blocks = step.columns[-2:]
        if at.size > MOST_CHANGES:
            self._steps.change_blocks((at, blocks))
            step.columns[-2:] = [at[:0], blocks[:0]]
        host = self._upload.take(_size(*size))
        fill_mixed(host, size, step, self._steps.rows)
        self._upload.send(host.size, self._inputs[: host.size])
        self.set.replay(size, 0, sum(size) - step.columns[0].size)
        asking = step.columns[STEP_COLUMNS.index("asking")].size
        return self._tokens[:asking], self._logprobs[:asking]

    def _captured(self, size: Size) -> Mapping[int, Launch]:
        decodes, tokens = size
        widths = _widths(decodes, tokens)
        inputs = self._inputs[: sum(widths)]
        parts = inputs.split(widths)
        splits = self._steps.splits(decodes, SHORT + 1)
        most = decodes + MOST_PIECES
        sampled, logprobs = self._tokens[:most], self._logprobs[:most]

        def launch() -> None:
            self._steps.launch_mixed(parts, PADDED, sampled, splits, most_queries=tokens, logprobs=logprobs)

        if self._device.type == "cuda":
            host = np.empty(inputs.numel(), np.int32)
            fill_mixed(host, size, EMPTY, self._steps.rows)
            inputs.copy_(torch.from_numpy(host))
        return {0: captured(launch, self._device, self._memory.pool, self._memory.measured())}


PADDED = plan_prompts(np.full(MOST_PIECES, 2, np.int32), np.zeros(MOST_PIECES, np.int32), PIECES)
"""The plan of a graph: MOST_PIECES pieces, whose sizes are known only on the device."""
EMPTY = PrefillDecodeStep(0, 0, PADDED, [np.zeros(int(name in ("bounds", "fresh")), np.int32) for name in STEP_COLUMNS])


def captured(
    launch: Launch, device: torch.device, pool: Any, measured: AbstractContextManager[None] | None = None
) -> Launch:
    """Captures `launch` as a graph; on a CPU returns it as it is. `measured` is entered just before the capture."""
    if device.type != "cuda":
        return launch
    launch()  # loads kernels and selects GEMMs before the capture
    graph = torch.cuda.CUDAGraph()
    # (thread_local: another thread may be about to wait for a finished step)
    with (
        measured or nullcontext(),
        _nothing_collected(),
        torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"),
    ):
        launch()
    return graph.replay


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Disables garbage collection during a capture: freeing a graph or device memory would invalidate it."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def graph_pool(device: torch.device) -> Any:
    """A memory pool shared by graphs, since only one of them runs at a time."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def _widths(decodes: int, tokens: int) -> list[int]:
    """Widths of the columns of MIXED in a graph."""
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


def fill_mixed(out: Ints, size: Size, step: PrefillDecodeStep, rows: DeviceRows) -> None:
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
    for name, place, column in zip(STEP_COLUMNS, places, step.columns, strict=True):
        place[:] = padding.get(name, 0)
        if name in STEP_COLUMNS[:3]:
            place[: step.num_decodes] = column[: step.num_decodes]
            place[size[0] : size[0] + column.size - step.num_decodes] = column[step.num_decodes :]
        elif name == "bounds":
            place[: column.size], place[column.size :] = column, column[-1]
        elif name == "last":
            place[: column.size] = column + shift * (column >= step.num_decodes)
        else:
            place[: column.size] = column
