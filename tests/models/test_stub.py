"""The stub models, through the real worker: forced scripts per choice, fixed logits, NaN on demand, stages in order."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from tests.models.rows import new_row, plan_of, rows_and_tokens
from tests.models.tiny import EOS, make_stub
from trireme.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from trireme.errors import ModelError
from trireme.model.reader import ArchSpec
from trireme.models.cpu.stub import StubModel
from trireme.models.forward import HostBatch
from trireme.params import RowParams
from trireme.topology.mesh import Mesh
from trireme.transport.wire.columns import pack, unpack
from trireme.transport.wire.messages import StepResult, WorkerInit
from trireme.workers.cpu.worker import CpuWorker

GREEDY = RowParams(20, temperature=0.0, eos_token_ids=(EOS,))


def start(model: Path, **parallel: Any) -> CpuWorker:
    """A loaded worker with 64 blocks of 16 tokens."""
    config = EngineConfig(
        model=ModelConfig(model=str(model), max_len=128),
        cache=CacheConfig(block_size=16),
        parallel=ParallelConfig(threads=1, **parallel),
    )
    worker = CpuWorker(WorkerInit(msgspec.msgpack.encode(config), 0, 0), lambda phase, done, total: None)
    worker.load()
    worker.setup_kv(64)
    return worker


def generate(worker: CpuWorker, rows: list[tuple[list[int], RowParams]], count: int) -> list[list[int]]:
    """Runs rows together for `count` steps, prompts whole; their outputs."""
    slots = list(range(len(rows)))
    new = [new_row(i, prompt, params, blocks=range(i * 8, i * 8 + 8)) for i, (prompt, params) in enumerate(rows)]
    lengths = [len(prompt) for prompt, _ in rows]
    outputs: list[list[int]] = [[] for _ in rows]
    last, computed, todo = [-1] * len(rows), [0] * len(rows), lengths
    for _ in range(count):
        result = worker.execute(plan_of(new=new, rows=slots, num_tokens=todo, num_computed=computed, tokens=last))
        assert isinstance(result, StepResult)
        assert result.faults == []
        computed, todo, new, last = (
            [a + b for a, b in zip(computed, todo, strict=True)],
            [1] * len(rows),
            [],
            unpack(result.tokens).tolist(),
        )
        for output, token in zip(outputs, unpack(result.tokens).tolist(), strict=True):
            output.append(token)
    worker.execute(plan_of(freed=slots))
    return outputs


def test_each_choice_follows_its_script(tmp_path: Path) -> None:
    """Whatever the prompt, the company and the temperature; then EOS for ever (O03: ignoring EOS gives no other token)."""
    worker = start(make_stub(tmp_path, scripts=[[104, 105], [10, 20, 30, 40]]))
    hot = RowParams(20, temperature=1.5, seed=3, choice=1)
    third = RowParams(20, temperature=0.0, choice=2)
    rows = [([1, 2, 3], GREEDY), ([9] * 40, hot), ([5], third)]
    expected = [[104, 105, EOS, EOS, EOS], [10, 20, 30, 40, EOS], [104, 105, EOS, EOS, EOS]]
    assert generate(worker, rows, 5) == expected
    assert generate(worker, rows[::-1], 5) == expected[::-1]


def test_a_resumed_row_goes_on_where_it_was(tmp_path: Path) -> None:
    """num_prompt tells the prompt from outputs that are computed anew after a preemption."""
    worker = start(make_stub(tmp_path, scripts=[[10, 20, 30, 40]]))
    placed = new_row(0, [1, 2, 3, 10, 20], GREEDY, num_prompt=3, blocks=[0])
    result = worker.execute(plan_of(new=[placed], rows=[0], num_tokens=[5]))
    assert result is not None
    assert result.tokens == pack([30])


def test_constant_logits(tmp_path: Path) -> None:
    """O05 through the whole worker."""
    worker = start(make_stub(tmp_path, "const", logits={0: 5.0, 1: 4.0}))
    penalised = RowParams(5, temperature=0.0, frequency_penalty=2.0)
    assert generate(worker, [([7, 7, 7], penalised), ([3] * 40, GREEDY)], 5) == [[0, 1, 0, 1, 0], [0] * 5]


def test_nan_choice_fails_alone(tmp_path: Path) -> None:
    directory = make_stub(tmp_path, scripts=[[10, 20]])
    config = json.loads((directory / "config.json").read_text())
    config["stub"]["nan_choice"] = 1
    (directory / "config.json").write_text(json.dumps(config))
    worker = start(directory)
    bad = RowParams(4, choice=1)
    new = [new_row(0, [1], GREEDY, blocks=[0]), new_row(1, [1], bad, blocks=[1])]
    result = worker.execute(plan_of(new=new, rows=[0, 1]))
    assert result is not None
    assert rows_and_tokens(result) == ([0], [10])
    assert [fault.row for fault in result.faults] == [1]


def test_delay(tmp_path: Path) -> None:
    worker = start(make_stub(tmp_path, scripts=[[1]], delay_ms=30))
    started = time.monotonic()
    generate(worker, [([1], GREEDY)], 2)
    assert time.monotonic() - started >= 0.06


def test_settings_that_do_not_parse_are_a_model_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="kind"):
        StubModel(_arch({"kind": "poem"}), Mesh(1, 1, 1), Pipe())


def _arch(stub: dict[str, object]) -> ArchSpec:
    return ArchSpec(
        family="stub", num_layers=2, hidden=8, num_heads=1, num_kv_heads=1, head_dim=8, ffn=8, vocab_size=64,
        eos_token_ids=(63,), source="stub", stub=stub,
    )  # fmt: skip


class Pipe:
    """A group of one rank whose stages talk through a list."""

    rank, size = 0, 1

    def __init__(self) -> None:
        self.sent: list[Tensor] = []

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        return x

    def send_next(self, x: Tensor) -> None:
        self.sent.append(x)

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return self.sent.pop(0)


def _host_batch(tokens: list[int]) -> HostBatch:
    ids, count = np.array(tokens, np.int32), np.arange(len(tokens), dtype=np.int32)
    start, length = np.array([0, len(tokens)], np.int32), np.array([len(tokens)], np.int32)
    none = np.zeros(1, np.int32)
    return HostBatch(ids, count, count, start, length, none[None], count[-1:], none, length)


def test_stages_must_see_the_same_steps() -> None:
    pipe = Pipe()
    arch = _arch({"kind": "script", "scripts": [[7]]})
    mesh = Mesh(1, 2, 1)
    first, last = StubModel(arch, mesh.at_worker(0), pipe), StubModel(arch, mesh.at_worker(1), pipe)
    assert first.forward(_host_batch([1, 2]), []) is None
    logits = last.forward(_host_batch([1, 2]), [])
    assert logits is not None
    assert logits.argmax(-1).tolist() == [7]
    first.forward(_host_batch([1, 2]), [])
    with pytest.raises(AssertionError, match="other tokens"):
        last.forward(_host_batch([1, 3]), [])
