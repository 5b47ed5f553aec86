"""Two pipeline stages of the GPU's step loop on the CPU: any plan passes as many hidden states as are awaited, and gives what one
stage gives."""

from __future__ import annotations

import random
from collections import deque
from typing import Any, cast

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.models.planner import Job, RandomPlanner, job_of
from tests.workers.adapting import IDLE, MOST_BYTES, adaptation_of, captured_by, hurry, tight_policies
from tests.workers.device_twin import VOCAB, TwinModel, sample_rows
from tests.workers.test_gpu_runner import BLOCK, CPU, MAX_LEN, NUM_BLOCKS, NUM_ROWS, alone, is_plain
from trireme.models.cuda.attention.prefill_plan import PIECES, Rules
from trireme.models.cuda.host_adapter import HostModel
from trireme.models.cuda.ops import CudaPagedKV
from trireme.models.forward import HostKV
from trireme.params import RowParams
from trireme.topology.mesh import Mesh
from trireme.transport.wire.messages import StepPlan, StepResult
from trireme.workers.batch import Batch
from trireme.workers.cpu.runner import Runner
from trireme.workers.cuda.device_state import DeviceRows
from trireme.workers.cuda.graph_policy import GraphPolicy
from trireme.workers.cuda.graph_sizes import fixed, sizes_up_to
from trireme.workers.cuda.graphs import DecodeGraphs, GraphMemory, MixedGraphs
from trireme.workers.cuda.ranks import sampling_mesh
from trireme.workers.cuda.runner import GpuRunner
from trireme.workers.cuda.steps import Steps
from trireme.workers.inputs import InputBuilder


class StageModel(TwinModel):
    """A stage: the first tells which tokens it has computed, the last one computes as many. They plan prompts differently."""

    def __init__(self, mesh: Mesh, passed: deque[list[int]]) -> None:
        super().__init__(Rules(whole_from=4, packs_fresh=True) if mesh.is_last_stage else PIECES)
        self.mesh, self._passed = mesh, passed

    def run(self, batch: Any, kv: list[CudaPagedKV], scratch: Tensor | None = None) -> Tensor:
        positions = batch.positions.tolist()
        if not self.mesh.is_last_stage:
            self._passed.append(positions)
            return batch.token_ids
        assert self._passed.popleft() == positions
        return super().run(batch, kv, scratch)


def make_stage(
    mesh: Mesh, passed: deque[list[int]], num_graphs: int, policies: tuple[GraphPolicy, GraphPolicy] | None = None
) -> tuple[GpuRunner, list[HostKV]]:
    model = StageModel(mesh, passed)
    kv = model.allocate_kv(NUM_BLOCKS, BLOCK)
    batch = Batch(NUM_ROWS, MAX_LEN, BLOCK, VOCAB, NUM_BLOCKS)
    inputs = InputBuilder(128, NUM_ROWS, MAX_LEN // BLOCK)
    slow = Runner(cast(Any, HostModel(cast(Any, model), "cpu")), cast(Any, kv), batch, inputs, sampling_mesh(mesh))
    rows = DeviceRows(NUM_ROWS, batch.blocks.shape[1], CPU)
    steps = Steps(model, kv, rows, sample_rows, max_tokens=16, device=CPU)
    memory = GraphMemory(CPU)
    sizes = sizes_up_to(num_graphs) if num_graphs else ()
    policies = policies or (fixed((size,) for size in sizes), fixed([(0, 8), (2, 4)] if num_graphs > 1 else ()))
    graphs, mixed = DecodeGraphs(steps, policies[0], memory), MixedGraphs(steps, policies[1], memory)
    for each in (graphs, mixed):
        each.set.capture_all("graphs", lambda phase, done, total: None)
    return GpuRunner(steps, graphs, batch, slow, mixed), [HostKV(layer.k.numpy(), layer.v.numpy()) for layer in kv]


class Pipeline:
    """Both stages behind one runner's interface. With `rng` what they have captured changes at random moments."""

    def __init__(self, num_graphs: int, rng: random.Random | None = None) -> None:
        passed: deque[list[int]] = deque()
        mesh = Mesh(1, 2, 1)
        made = [
            make_stage(mesh.at_worker(rank), passed, num_graphs, tight_policies() if rng is not None else None)
            for rank in range(2)
        ]
        (self._first, _), (self._last, self.kv) = made
        self.keeps_tokens, self.max_logits = False, self._last.max_logits
        self._rng, self._adaptations = rng, [adaptation_of(runner) for runner, _ in made]
        self.done: list[str] = []

    def execute(self, plan: StepPlan) -> StepResult:
        self._first.launch(plan)
        result = self._last.execute(plan)
        if self._rng is not None and self._rng.random() < 0.5:
            known = {**IDLE, "held": self._rng.choice([10, 10, 2 * MOST_BYTES])}
            first, last = (each.adapt(known, is_idle=True)["done"] for each in self._adaptations)
            assert first == last
            assert captured_by(self._first) == captured_by(self._last)
            self.done.append(first)
        return result


@settings(deadline=None, max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.one_of(job_of(VOCAB), job_of(VOCAB).map(is_plain)), min_size=1, max_size=5),
    st.integers(0, 2**32),
    st.sampled_from([0, 2, NUM_ROWS]),
)
def test_any_plan_gives_what_one_stage_gives(
    jobs: list[tuple[list[int], RowParams]], seed: int, num_graphs: int
) -> None:
    drive(Pipeline(num_graphs), jobs, seed)


@settings(deadline=None, max_examples=8, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(job_of(VOCAB).map(is_plain), min_size=2, max_size=5), st.integers(0, 2**32))
def test_stages_change_what_is_captured_alike(jobs: list[tuple[list[int], RowParams]], seed: int) -> None:
    """Else they would not pass as many hidden states as are awaited."""
    with pytest.MonkeyPatch.context() as patch:
        hurry(patch)
        drive(Pipeline(0, random.Random(seed)), jobs, seed)


def test_stages_do_change(monkeypatch: pytest.MonkeyPatch) -> None:
    hurry(monkeypatch)
    runner = Pipeline(0, random.Random(1))
    drive(runner, [([5 + i] * (1 + 4 * i), RowParams(20)) for i in range(4)], 1)
    assert any(done.startswith("add") for done in runner.done)
    assert any(done.startswith("drop") for done in runner.done)


def drive(runner: Pipeline, jobs: list[tuple[list[int], RowParams]], seed: int) -> None:
    """Every job gets what it gets alone in one stage."""
    together = [Job(*job) for job in jobs]
    planner = RandomPlanner(
        random.Random(seed), together, cast(Any, runner), runner.kv, num_rows=NUM_ROWS, block_size=BLOCK, tolerance=0.0
    )
    planner.run()
    for mine, job in zip(together, jobs, strict=True):
        assert mine.outputs == alone(job).outputs
