"""FakeWorker: a worker without tensors, used by tests of everything above the model. Same methods as workers.cpu.worker.CpuWorker.

It writes (position, token) of every computed token into a fake KV memory through the block tables, and draws the next
token from a hash of what it reads back. So any mistake with blocks, prefixes, chunks or preemption changes the tokens.
"""

from __future__ import annotations

import os
import signal
import time
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import msgspec
import numpy as np

from trireme.config import EngineConfig
from trireme.errors import EngineError
from trireme.params import RowParams
from trireme.topology.lockstep import Agreed
from trireme.topology.mesh import Mesh
from trireme.transport.wire.columns import pack, unpack, unpack_flags
from trireme.transport.wire.messages import LogprobRow, NewRow, RowFault, StepPlan, StepResult, WorkerInit, WorkerLoaded

if TYPE_CHECKING:
    from trireme.workers.collectives.lockstep import Peers


class FakeOptions(msgspec.Struct, frozen=True):
    """Key "fake" of the model directory's config.json. Token ids that trigger faults are searched for in prompts."""

    low: int = 97  # tokens are drawn from low..high
    high: int = 122
    eos_every: int = 0  # when > 0, one token in so many is `eos`
    eos: int = 257
    delay_ms: float = 0.0  # per step
    load_ms: float = 0.0  # before WorkerLoaded
    block_bytes: int = 4096
    free_bytes: int = 4096 * 4096
    row_fault_token: int = -1  # RowFault when first computed
    crash_token: int = -1  # execute() raises
    die_token: int = -1  # SIGKILL to this process
    hang_token: int = -1  # execute() never returns
    skip_kv: bool = False  # neither writes nor reads KV: always the token `low`, and no faults (benchmarks)
    fail_load: str = ""  # load() raises EngineError with this text on worker 0


class FakeStub(msgspec.Struct, frozen=True):
    """The part of a stub model (key "stub") that needs no tensors: scripts per choice."""

    kind: Literal["hash", "script", "const"] = "hash"
    scripts: list[list[int]] = []
    delay_ms: float = 0.0


class FakeModel(msgspec.Struct, frozen=True):
    """config.json as far as the fake worker reads it; absent keys (or no file at all) mean these defaults."""

    vocab_size: int = 320
    fake: FakeOptions = FakeOptions()
    stub: FakeStub = FakeStub()


@dataclass(slots=True)
class FakeRow:
    """A sequence of the persistent batch: all its known tokens and its block table."""

    tokens: list[int]
    num_prompt: int
    params: RowParams
    blocks: list[int]


class FakeWorker:
    """One worker of an engine. Every worker computes every sequence (nothing is split); one reports."""

    def __init__(self, init: WorkerInit, progress: Callable[[str, int, int], None]) -> None:
        self.config = msgspec.msgpack.decode(init.config, type=EngineConfig)
        parallel = self.config.parallel
        self.mesh = Mesh(parallel.dp, parallel.pp, parallel.tp, init.dp_rank).at_worker(init.worker)
        self.progress = progress
        self.model = read_fake_model(self.config.model.model)
        self.block_size = self.config.cache.block_size
        self.rows: dict[int, FakeRow] = {}
        self.kv = np.zeros((0, self.block_size, 2), np.int32)
        self.before_forward: Callable[[], object] = lambda: None  # called before other threads get the interpreter
        self.failed: set[int] = set()  # slots that gave a fault, until they are freed
        self.num_steps = 0
        self.is_asleep = False
        self._peers_arena = init.peers
        self._peers: Peers | None = None

    def load(self) -> WorkerLoaded:
        """Simulates reading weights, in two progress reports."""
        fake = self.model.fake
        self.progress("load", 0, 1)
        time.sleep(fake.load_ms / 1e3)
        if self._peers_arena:
            from trireme.workers.collectives.lockstep import Peers

            limit_s = self.config.collective_timeout
            self._peers = Peers(self._peers_arena, self.mesh.dp_rank, self.mesh.dp, timeout_s=limit_s)
        if fake.fail_load and self.mesh.worker == 0:
            raise EngineError(fake.fail_load, hint="remove fail_load from config.json")
        self.progress("load", 1, 1)
        return WorkerLoaded(
            worker=self.mesh.worker,
            vocab_size=self.model.vocab_size,
            block_bytes=fake.block_bytes,
            free_bytes=fake.free_bytes,
            weight_bytes=0,
            phases={"load": fake.load_ms / 1e3},
            decisions=[("worker", "fake", "--worker fake was asked for")],
        )

    def setup_kv(self, num_blocks: int) -> dict[str, float]:
        """Allocates KV poisoned with marker values, so that reading an unwritten KV slot changes the hash."""
        self.kv = np.full((num_blocks, self.block_size, 2), -7, np.int32)
        return {}

    def execute(self, plan: StepPlan) -> StepResult | None:
        """Applies the plan, writes KV, samples. None unless this worker reports."""
        started = time.monotonic()
        if self.is_asleep:
            raise EngineError("a step arrived while this worker was asleep")
        self.before_forward()
        agreed = self._meet(plan)
        if self.model.fake.skip_kv:
            rows = unpack(plan.rows)[unpack_flags(plan.sample)]
            tokens = np.full(rows.size, self.model.fake.low)
            result = StepResult(plan.step, pack(rows), pack(tokens), agreed=agreed)
            return result if self.mesh.reports_result else None
        self._apply(plan)
        faults = self._write(plan)
        delay_ms = self.model.fake.delay_ms or self.model.stub.delay_ms
        if delay_ms:
            time.sleep(delay_ms / 1e3)
        self.num_steps += 1
        if not (self.mesh.reports_result or self.config.runs_ahead):
            return None
        result = msgspec.structs.replace(self._sample(plan, faults, started), agreed=agreed)
        return result if self.mesh.reports_result else None

    def call(self, method: str, args: dict[str, Any]) -> Any:
        """`info` returns the mesh position and the steps run; `sleep` and `wake` drop the KV memory. Others raise
        EngineError."""
        if method == "info":
            found = {"worker": self.mesh.worker, "steps": self.num_steps, "rows": len(self.rows), "pid": os.getpid()}
            peers = self._peers
            return found if peers is None else {**found, "collectives": peers.num_steps, "trace": peers.trace}
        if method in ("sleep", "wake"):
            self.is_asleep = method == "sleep"
            self.kv[:] = -7
            return None
        raise EngineError(f"the fake worker has no method {method!r}")

    def close(self) -> None:
        self.rows.clear()

    def _meet(self, plan: StepPlan) -> Agreed | None:
        """In lockstep: agrees with the other engines, then exchanges batches of the agreed shape with them, as experts do."""
        if self._peers is None:
            return None
        num_tokens = int(unpack(plan.num_tokens).sum())
        agreed = self._peers.agree(plan.ballot, num_tokens)
        if agreed.num_tokens:
            mine = np.full(agreed.num_tokens, plan.ballot.step if plan.ballot else 0, np.int32)
            assert (self._peers.gather(mine) == mine).all(), f"step {plan.step}: another engine is in another step"
        return agreed

    def _apply(self, plan: StepPlan) -> None:
        """Applies the deltas of a plan, in the order of its fields; one that does not fit is a bug of the planner."""
        for row in plan.freed:
            del self.rows[row]
            self.failed.discard(row)
        for new in plan.new:
            assert new.row not in self.rows, f"slot {new.row} is placed twice"
            self.rows[new.row] = _row_from_new(new)
        for row, block in zip(unpack(plan.grown_rows).tolist(), unpack(plan.grown_blocks).tolist(), strict=True):
            self.rows[row].blocks.append(block)
        for source, destination in plan.copies:
            self.kv[destination] = self.kv[source]
        for row, token in zip(unpack(plan.rows).tolist(), unpack(plan.tokens).tolist(), strict=True):
            if token >= 0:
                assert not self.config.runs_ahead, f"slot {row} is told a token that this worker holds"
                self.rows[row].tokens.append(token)

    def _write(self, plan: StepPlan) -> list[RowFault]:
        """Writes the KV of this step's tokens; injects the scripted faults."""
        fake, faults = self.model.fake, []
        for row_id, count, start, _ in _scheduled(plan):
            if row_id in self.failed:
                faults.append(RowFault(row_id, "a fault in an earlier step"))
                continue
            row = self.rows[row_id]
            end = start + count
            assert count > 0, f"slot {row_id} has nothing to compute"
            assert end <= len(row.tokens), f"slot {row_id}: {end} tokens planned, {len(row.tokens)} known"
            chunk = row.tokens[start:end]
            if fake.crash_token in chunk:
                raise RuntimeError(f"scripted crash in slot {row_id}")
            if fake.die_token in chunk:
                os.kill(os.getpid(), signal.SIGKILL)
            while fake.hang_token in chunk:
                time.sleep(3600)
            if fake.row_fault_token in chunk:
                faults.append(RowFault(row_id, "scripted fault"))
                self.failed.add(row_id)
                continue  # nothing is written: any sequence that reads these blocks gets other tokens
            positions = np.arange(start, end)
            blocks = np.array(row.blocks, np.int64)[positions // self.block_size]
            offsets = positions % self.block_size
            self.kv[blocks, offsets, 0] = positions
            self.kv[blocks, offsets, 1] = chunk
        return faults

    def _sample(self, plan: StepPlan, faults: list[RowFault], started: float) -> StepResult:
        faulted = {fault.row for fault in faults}
        rows: list[int] = []
        tokens: list[int] = []
        logprobs: list[LogprobRow] = []
        prompt_logprobs: list[LogprobRow] = []
        for row_id, count, start, sample in _scheduled(plan):
            if row_id in faulted:
                continue
            row, end = self.rows[row_id], start + count
            last = min(end, row.num_prompt - 1)
            if row.params.prompt_logprobs >= 0 and start < last:
                targets = row.tokens[start + 1 : last + 1]
                prompt_logprobs.append(self._logprobs(row_id, row, start, targets, row.params.prompt_logprobs))
            if sample:
                token = self._next_token(row, end)
                rows.append(row_id)
                tokens.append(token)
                if row.params.logprobs >= 0:
                    logprobs.append(self._logprobs(row_id, row, end - 1, [token], row.params.logprobs))
                if self.config.runs_ahead:
                    assert end == len(row.tokens), f"slot {row_id} samples after {end} of {len(row.tokens)} tokens"
                    row.tokens.append(token)
        elapsed = time.monotonic() - started
        return StepResult(plan.step, pack(rows), pack(tokens), logprobs, prompt_logprobs, faults, elapsed)

    def _next_token(self, row: FakeRow, end: int) -> int:
        if self.model.stub.kind == "script":
            scripts = self.model.stub.scripts
            script = scripts[row.params.choice % len(scripts)]
            num_output = end - row.num_prompt
            return script[num_output] if num_output < len(script) else self.model.fake.eos
        return fake_token(self._read(row, end), row.params, self.model.fake)

    def _read(self, row: FakeRow, end: int) -> bytes:
        """The first `end` (position, token) pairs of a sequence, gathered through its block table."""
        num_blocks = -(-end // self.block_size)
        return self.kv[row.blocks[:num_blocks]].reshape(-1, 2)[:end].tobytes()

    def _logprobs(self, row_id: int, row: FakeRow, start: int, targets: list[int], k: int) -> LogprobRow:
        """Log-probabilities of `targets`, which follow the positions start, start + 1, ...: a hash of the KV before each."""
        count = len(targets)
        ids = np.zeros((count, 1 + k), np.int32)
        values = np.zeros((count, 1 + k), np.float32)
        for i, target in enumerate(targets):
            seen = zlib.crc32(self._read(row, start + i + 1))
            ids[i] = [target, *((seen + j) % self.model.vocab_size for j in range(k))]
            values[i] = [-(((seen >> 8) + target) % 4096) / 256, *(-(j + 1) / 4 for j in range(k))]
        return LogprobRow(row_id, ids, values, np.ones(count, np.int32))


def fake_token(kv: bytes, params: RowParams, fake: FakeOptions) -> int:
    """The next token after a context of (position, token) int32 pairs; seed and choice matter unless sampling is greedy."""
    draw = zlib.crc32(kv)
    if not params.is_greedy:
        draw = zlib.crc32(f"{params.seed} {params.choice}".encode(), draw)
    if fake.eos_every and draw % fake.eos_every == 0:
        return fake.eos
    return fake.low + (draw >> 8) % (fake.high - fake.low + 1)


def expected_tokens(prompt: list[int], params: RowParams, fake: FakeOptions, count: int) -> list[int]:
    """What a sequence emits when it runs alone: the oracle of every test of batching, chunking, caching and preemption."""
    tokens = list(prompt)
    for _ in range(count):
        pairs = np.stack([np.arange(len(tokens)), np.array(tokens)], axis=1).astype(np.int32)
        tokens.append(fake_token(pairs.tobytes(), params, fake))
    return tokens[len(prompt) :]


def read_fake_model(model: str) -> FakeModel:
    """config.json of a model directory, or the defaults when there is none."""
    path = Path(model) / "config.json"
    if not path.is_file():
        return FakeModel()
    return msgspec.json.decode(path.read_bytes(), type=FakeModel)


def _scheduled(plan: StepPlan) -> Iterator[tuple[int, int, int, bool]]:
    """(slot, tokens to compute, tokens computed, samples) of each scheduled sequence."""
    columns = (unpack(column).tolist() for column in (plan.rows, plan.num_tokens, plan.num_computed))
    return zip(*columns, unpack_flags(plan.sample).tolist(), strict=True)


def _row_from_new(new: NewRow) -> FakeRow:
    return FakeRow(new.tokens.tolist(), new.num_prompt, new.params, list(new.blocks))


Worker = FakeWorker
