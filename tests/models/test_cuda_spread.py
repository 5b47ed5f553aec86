"""The GPU's model body spread over ranks and stages, on the CPU: ops in plain torch, ranks in threads, the logits of one card."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from tests.models.test_prefill_plan import fresh, whole
from tests.models.test_shards import Stored, arch_of
from trireme.model.bodies import GptBody
from trireme.model.spec import ArchSpec
from trireme.models.cpu.stage_weights import weight_names
from trireme.models.cuda import decoder as cuda
from trireme.models.cuda import ops as cuda_ops
from trireme.models.cuda import reference as cuda_reference
from trireme.models.cuda.attention.prefill import PromptAttention, Prompts
from trireme.models.cuda.attention.prefill_plan import PIECES, Rules, plan_prompts
from trireme.models.cuda.attention.registry import LENGTHS, Kernel, KernelTiming, choose
from trireme.models.cuda.decoder import CudaBatch, CudaModel
from trireme.models.cuda.weights.shards import own_weights
from trireme.models.weights.tp_shards import RankSpans
from trireme.topology.mesh import Mesh

CPU = torch.device("cpu")
ROWS, STEPS, BLOCK = 3, 4, 4
PATIENCE_S = 100  # a busy machine
OPS = (
    *(
        "rms_norm",
        "rms_norm_narrow",
        "rotary_and_cache",
        "decode_attention",
        "layer_norm",
        "layer_norm_narrow",
        "gated_activation",
        "activation",
        "gather_rows",
    ),
    "skinny_linear",
)


class OnCpu(TorchFunctionMode):
    """Whatever asks for the GPU gets the CPU."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        if func is Tensor.cuda:
            return args[0]
        return func(*("cpu" if isinstance(arg, str) and arg == "cuda" else arg for arg in args), **kwargs)


@pytest.fixture(autouse=True)
def plain_ops(monkeypatch: pytest.MonkeyPatch) -> None:
    make_plain(monkeypatch)


def make_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ops in plain torch in the places of the kernels."""
    for name in OPS:
        monkeypatch.setattr(cuda_ops, name, getattr(cuda_reference, name + "_reference"))
    monkeypatch.setattr(cuda_ops, "fp8_linear_rows", lambda k: 0)
    kernel = Kernel("reference", "pieces", lambda: cuda_reference.piece_attention_reference)
    monkeypatch.setattr(
        cuda, "choose_on_gpu", lambda need, *_: choose(need, [KernelTiming(kernel, (1.0,) * len(LENGTHS))])
    )


class Meeting:
    """Where the threads of one engine exchange tensors."""

    def __init__(self, mesh: Mesh) -> None:
        self.stages = [threading.Barrier(mesh.tp) for _ in range(mesh.pp)]
        self.held: dict[int, Tensor] = {}
        self.pipes: dict[int, queue.SimpleQueue[Tensor]] = {w: queue.SimpleQueue() for w in range(mesh.num_workers)}


class ThreadGroup:
    """models.forward.Group between threads."""

    def __init__(self, mesh: Mesh, meeting: Meeting) -> None:
        self.rank, self.size, self._mesh, self._meeting = mesh.tp_rank, mesh.tp, mesh, meeting

    def _parts(self, x: Tensor) -> list[Tensor]:
        meeting, barrier = self._meeting, self._meeting.stages[self._mesh.pp_rank]
        meeting.held[self._mesh.worker] = x.clone()
        barrier.wait(PATIENCE_S)
        parts = [meeting.held[worker] for worker in self._mesh.tp_group()]
        barrier.wait(PATIENCE_S)
        return parts

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.copy_(torch.stack(self._parts(x)).sum(0))

    def all_gather(self, x: Tensor, sizes: list[int]) -> Tensor:
        assert x.shape[-1] == sizes[self.rank]
        return torch.cat(self._parts(x), -1) if self.size > 1 else x

    def send_next(self, x: Tensor) -> None:
        self._meeting.pipes[self._mesh.worker + self._mesh.tp].put(x.clone())

    def recv_prev(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        found = self._meeting.pipes[self._mesh.worker].get(timeout=PATIENCE_S)
        assert tuple(found.shape) == shape
        return found


def batch_of(step: int) -> CudaBatch:
    """Token `step` of every row; rows have blocks of their own."""
    ints = {"dtype": torch.int32}
    table = torch.arange(ROWS * 2, **ints).view(ROWS, 2)  # type: ignore[call-overload]
    slots = table[:, step // BLOCK] * BLOCK + step % BLOCK
    return CudaBatch(
        token_ids=torch.tensor([(7 * row + 11 * step) % 50 for row in range(ROWS)], **ints),  # type: ignore[call-overload]
        positions=torch.full((ROWS,), step, **ints),  # type: ignore[call-overload]
        slots=slots,
        context_len=torch.full((ROWS,), step + 1, **ints),  # type: ignore[call-overload]
        block_table=table,
        logits_index=None,
        num_decodes=ROWS,
    )


def run_rank(arch: ArchSpec, mesh: Mesh, meeting: Meeting, make_source: Callable[[RankSpans], Any]) -> list[Tensor]:
    with OnCpu(), torch.inference_mode():
        place = (mesh, ThreadGroup(mesh, meeting) if mesh.num_workers > 1 else None)
        source = make_source(RankSpans(arch, mesh))
        model = CudaModel(arch, source, torch.float32, max_len=16, progress=lambda *_: None, place=place)
        kv = model.allocate_kv(ROWS * 2, BLOCK)
        return [model.run(batch_of(step), kv).clone() for step in range(STEPS)]


def logits_of(arch: ArchSpec, tp: int, pp: int, make_source: Callable[[RankSpans], Any]) -> list[Tensor]:
    """Of every step; all ranks of the last stage must agree to the bit."""
    mesh = Mesh(1, pp, tp)
    meeting = Meeting(mesh)
    places = [mesh.at_worker(worker) for worker in range(mesh.num_workers)]
    with ThreadPoolExecutor(mesh.num_workers) as pool:
        found = list(pool.map(lambda place: run_rank(arch, place, meeting, make_source), places))
    last = found[-tp:]
    for other in last[1:]:
        assert all(torch.equal(a, b) for a, b in zip(other, last[0], strict=True))
    return last[0]


def stored(arch: ArchSpec) -> Callable[[RankSpans], Any]:
    """Weights small enough that logits stay comparable, through the same classes as a model's files."""

    class Small(Stored):
        def names(self) -> set[str]:
            return set(weight_names(arch))

    return lambda shares: own_weights(Small(), torch.float32, CPU, shares)


@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (1, 2), (2, 2)], ids=["tp2", "tp3", "pp2", "tp2pp2"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": True, "qkv_bias": False, "o_bias": False, "mlp_bias": False},
        {"norm_placement": "both"},
        {"norm_placement": "parallel", "norm_kind": "layer"},
        {"qk_norm": True, "qk_norm_kind": "wide", "norm_placement": "post"},
        {"qk_norm": True, "qk_norm_kind": "heads", "num_heads": 4, "num_kv_heads": 1},
        {"body": GptBody(learned_positions=16, scale_by_layer=True)},
        {"body": GptBody(parallel=True, activation="relu")},
        {"body": GptBody(parallel=True, norms="shared")},
    ],
    ids=["biases", "tied", "post-norms", "parallel", "wide", "heads", "positions", "two-norms", "one-norm"],
)
def test_logits_are_those_of_one_card(shape: tuple[int, int], changes: dict[str, Any]) -> None:
    arch = arch_of(**{"tie_embeddings": False, **changes})
    alone = logits_of(arch, 1, 1, stored(arch))
    spread = logits_of(arch, *shape, stored(arch))
    assert alone[0].shape == (ROWS, arch.vocab_size)
    assert alone[-1].std() > 0.1
    for a, b in zip(alone, spread, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3 * float(a.abs().max()))


@pytest.mark.parametrize(
    "rules", [PIECES, Rules(packs_fresh=True), Rules(whole_from=3)], ids=["pieces", "fresh", "whole"]
)
def test_prompts_give_what_their_tokens_give_one_by_one(rules: Rules) -> None:
    """All prompts in one step, beside nothing, and the last row as a decode of its last token beside the others."""
    arch = arch_of(tie_embeddings=False)
    make_source = stored(arch)
    expected = torch.stack(logits_of(arch, 1, 1, make_source), 1)  # [rows, steps, vocabulary]
    with OnCpu(), torch.inference_mode():
        model = CudaModel(
            arch, make_source(RankSpans(arch, Mesh(1, 1, 1))), torch.float32, max_len=16, progress=lambda *_: None
        )
        model.prompt_attention = PromptAttention(
            rules, cuda_reference.piece_attention_reference, whole=whole, fresh=fresh
        )
        kv = model.allocate_kv(ROWS * 2, BLOCK)
        found = model.run(prompts_of([*range(ROWS)], rules), kv).view(ROWS, STEPS, -1)
        again = model.run(prompts_of([ROWS - 1, *range(ROWS - 1)], rules, num_decodes=1), kv)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again[0], expected[-1, -1], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(again[1:].view(ROWS - 1, STEPS, -1), expected[:-1], rtol=1e-3, atol=1e-3)


def prompts_of(rows: list[int], rules: Rules, num_decodes: int = 0) -> CudaBatch:
    """All STEPS tokens of `rows` as prompts, but of the first `num_decodes` the last token alone."""
    whole_rows = [(row, step) for row in rows[num_decodes:] for step in range(STEPS)]
    tokens = [(row, STEPS - 1) for row in rows[:num_decodes]] + whole_rows
    row, step = torch.tensor(tokens).T.int()
    every = batch_of(0).block_table
    counts = np.full(len(rows) - num_decodes, STEPS, np.int32)
    plan = plan_prompts(counts, 0 * counts, rules)
    _, *columns = map(torch.from_numpy, plan.columns)
    places = torch.tensor(rows[num_decodes:]).int()[plan.piece_row.tolist()]
    return CudaBatch(
        token_ids=(7 * row + 11 * step) % 50,
        positions=step,
        slots=every[row.long(), (step // BLOCK).long()] * BLOCK + step % BLOCK,
        context_len=torch.full((num_decodes,), STEPS).int(),
        block_table=every[rows[:num_decodes]],
        logits_index=None,
        num_decodes=num_decodes,
        prompts=Prompts.of(plan, every, (places, *columns)),
    )
