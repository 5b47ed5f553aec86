"""Operands that do not fit are refused by the bindings of models._native, by an error that names the operation and the operand."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.models.native import load_native
from trireme.topology.arena import create_arena
from trireme.topology.mesh import Mesh

native = load_native()
# A step of T tokens of R sequences. H hidden, F half a gate_up, V vocabulary; 4 query, 2 KV heads of size D, S tokens a block.
T, R, H, F, V, D, S = 3, 2, 6, 5, 10, 8, 4
Q, KV = 4 * D, 2 * D
Operands = dict[str, Any]


class Plain(torch.Tensor):
    """A tensor of a class without DLPack's table: it is read by its attributes."""

    __dlpack_c_exchange_api__ = None


def ints(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def raw(*shape: int) -> Tensor:
    return torch.zeros(*shape, dtype=torch.uint8)


def weight(n: int, k: int) -> Any:
    return native.pack_weight(0, raw(n * 4 * k), n, k)


@dataclass
class Op:
    """A bound function, operands that fit, and what is special about some. Those in `leads` may have other sizes: it is then
    others that do not fit."""

    call: Callable[..., object]
    operands: dict[str, Tensor]
    leads: tuple[str, ...]
    optional: tuple[str, ...] = ()
    any_type: bool = False
    any_rank: bool = False
    numbers: Operands = field(default_factory=dict)

    def run(self, **other: Any) -> object:
        return self.call(**(self.operands | self.numbers | other))


CACHES = {"k_cache": torch.zeros(5, 2, D, S), "v_cache": torch.zeros(5, 2, S, D)}
BATCH = {"query_start": ints(0, 2, 3), "context_len": ints(4, 1), "block_table": ints(0, 1, 2, 3).view(R, 2)}
ROTATION = {"cos_sin": torch.zeros(9, D), "positions": ints(2, 3, 0), "slots": ints(2, 3, 8)}
QK_NORMS = {"q_norm": torch.ones(D), "k_norm": torch.ones(D)}
BEST = {"best_ids": ints(*range(2 * T)).view(T, 2), "logprobs": torch.zeros(T, 2), "ranks": ints(0, 0, 0)}
SCALING = {"scale": 1.0, "window": 0, "softcap": 0.0}


def make_stage() -> Any:
    """A stage of one layer with wide norms."""
    return native.DecoderStage((H, 4, 2, D, F), (1e-5, 1.0, 0.0, 1.0), True, 0)


LINEARS = {"qkv": weight(Q + 2 * KV, H), "o": weight(H, Q), "gate_up": weight(2 * F, H), "down": weight(H, F)}
OUTPUTS = {"qkv": Q + 2 * KV, "o": H, "gate_up": 2 * F, "down": H}
NORMS = {"attn_norm": H, "ffn_norm": H, "q_norm": Q, "k_norm": KV, "attn_post": H, "ffn_post": H}


def add_layer(*, stage: Any = None, linears: dict[str, Any] | None = None, **given: Any) -> Any:
    """A stage with a layer of these operands; a bias is called after its linear layer."""
    stage = stage or make_stage()
    pairs = [[(linear, given[f"{name} bias"])] for name, linear in (LINEARS | (linears or {})).items()]
    stage.add_layer([given[name] for name in NORMS], 0, given["cos_sin"], pairs)
    return stage


LAYER = {
    **{name: torch.ones(size) for name, size in NORMS.items()},
    **{f"{name} bias": torch.zeros(n) for name, n in OUTPUTS.items()},
    "cos_sin": ROTATION["cos_sin"],
}
BUFFERS = {"hidden": H, "normed": H, "qkv": Q + 2 * KV, "attended": Q, "gate_up": 2 * F, "product": F}


def bind_kv(k_cache: Any, v_cache: Any) -> Any:
    stage = add_layer(**LAYER)
    stage.bind_kv([(k_cache, v_cache)])
    return stage


def run_stage(positions: Any, slots: Any, query_start: Any, context_len: Any, block_table: Any, **buffers: Any) -> None:
    inputs = (positions, slots, query_start, context_len, block_table)
    bind_kv(**CACHES).run(inputs, [buffers[name] for name in BUFFERS])


def with_comm(name: str) -> Callable[..., object]:
    """A collective of the first of two ranks, which finds a fault before it waits for the other."""

    def call(**given: Any) -> object:
        with create_arena(Mesh(1, 1, 2), 8, 8, 8) as arena:
            return getattr(native.Comm(arena.path, 0, 0, 1.0, 1.0), name)(**given)

    return call


STEP = {"positions": ROTATION["positions"], "slots": ROTATION["slots"], **BATCH}
OPS = {
    "rms_norm": Op(
        native.rms_norm,
        {"x": torch.ones(T, H), "weight": torch.ones(H), "out": torch.zeros(T, H)},
        ("x",),
        numbers={"eps": 1e-5},
    ),
    "add_rms_norm": Op(
        native.add_rms_norm,
        {"x": torch.ones(T, H), "residual": torch.ones(T, H), "weight": torch.ones(H), "out": torch.zeros(T, H)},
        ("x",),
        numbers={"eps": 1e-5},
    ),
    "rope_and_cache": Op(
        native.rope_and_cache,
        {
            "q": torch.ones(T, 4, D),
            "k": torch.ones(T, 2, D),
            "v": torch.ones(T, 2, D),
            **ROTATION,
            **CACHES,
            **QK_NORMS,
        },
        ("k_cache", "cos_sin"),
        ("q_norm", "k_norm"),
        numbers={"eps": 1e-5},
    ),
    "paged_attention": Op(
        native.paged_attention,
        {"q": torch.ones(T, 4, D), **CACHES, **BATCH, "out": torch.zeros(T, Q)},
        ("k_cache", "block_table"),
        numbers=SCALING,
    ),
    "rope_cache_attention": Op(
        native.rope_cache_attention,
        {"qkv": torch.ones(T, Q + 2 * KV), **CACHES, **ROTATION, **BATCH, **QK_NORMS, "out": torch.zeros(T, Q)},
        ("k_cache", "block_table", "cos_sin"),
        ("q_norm", "k_norm"),
        numbers=SCALING | {"eps": 1e-5},
    ),
    "swiglu": Op(native.swiglu, {"gate_up": torch.ones(T, 2 * F), "out": torch.zeros(T, F)}, ("out",)),
    "geglu": Op(native.geglu, {"gate_up": torch.ones(T, 2 * F), "out": torch.zeros(T, F)}, ("out",)),
    "pack_weight": Op(native.pack_weight, {"raw": raw(2 * 34)}, (), numbers={"kind": 3, "n": 2, "k": 32}),
    "quantize_weight": Op(
        native.quantize_weight, {"values": torch.ones(2, 32), "raw": raw(2, 34)}, ("values",), numbers={"kind": 3}
    ),
    "linear": Op(
        native.linear,
        {"x": torch.ones(T, H), "out": torch.zeros(T, F), "bias": torch.zeros(F)},
        (),
        ("bias",),
        numbers={"weight": weight(F, H), "accumulate": False},
    ),
    "gather_rows": Op(
        native.gather_rows, {"ids": ints(1, 0), "out": torch.zeros(2, H)}, ("ids",), numbers={"weight": weight(F, H)}
    ),
    "sample_rows": Op(
        native.sample_rows,
        {
            "logits": torch.ones(T, V),
            "jobs": raw(T * native.SAMPLE_JOB_BYTES),
            "tokens": ints(0, 0, 0),
            "peaks": torch.zeros(T),
            **BEST,
        },
        ("logits", "best_ids"),
    ),
    "logprob_rows": Op(
        native.logprob_rows, {"logits": torch.ones(T, V), "targets": ints(1, 2, 3), **BEST}, ("logits", "best_ids")
    ),
    "race": Op(
        native.race, {"logits": torch.ones(V)}, ("logits",), numbers={"peak": 1.0, "temperature": 1.0, "key": 1}
    ),
    "parallel_probe": Op(native.parallel_probe, {"counts": ints(0, 0)}, ("counts",), numbers={"rounds": 1}),
    "add_layer": Op(add_layer, LAYER, ("cos_sin",), tuple(name for name in LAYER if name != "cos_sin")),
    "bind_kv": Op(bind_kv, CACHES, ("k_cache",)),
    "run": Op(
        run_stage,
        STEP | {name: torch.zeros(T, width) for name, width in BUFFERS.items()},
        ("positions", "block_table"),
    ),
    "all_reduce": Op(with_comm("all_reduce"), {"x": torch.ones(T, H)}, ("x",), any_rank=True),
    "all_gather": Op(
        with_comm("all_gather"),
        {"x": torch.ones(T, 2), "out": torch.zeros(T, 6)},
        (),
        any_type=True,
        any_rank=True,
        numbers={"columns": [2, 4]},
    ),
    "reduce_scatter": Op(
        with_comm("reduce_scatter"),
        {"x": torch.ones(T, 6), "out": torch.zeros(T, 2)},
        (),
        any_rank=True,
        numbers={"columns": [2, 4]},
    ),
    "broadcast": Op(
        with_comm("broadcast"), {"x": torch.ones(T, H)}, ("x",), any_type=True, any_rank=True, numbers={"root": 0}
    ),
    "send_next": Op(with_comm("send_next"), {"x": torch.ones(T, H)}, ("x",), any_type=True, any_rank=True),
    "recv_prev": Op(with_comm("recv_prev"), {"x": torch.ones(T, H)}, ("x",), any_type=True, any_rank=True),
}


def wrong_type(x: Tensor) -> Tensor:
    return x.double() if x.is_floating_point() else x.to(torch.int64)


def with_gaps(x: Tensor) -> Tensor:
    return torch.stack((x, x), -1)[..., 0]


def without_its_first_dimension(x: Tensor) -> Tensor:
    return x[0]


def narrower(x: Tensor) -> Tensor:
    return x[..., :-1].contiguous()


def elsewhere(x: Tensor) -> Tensor:
    return x.to("meta")


def missing(x: Tensor) -> None:
    return None


FAULTS = (wrong_type, with_gaps, without_its_first_dimension, narrower, elsewhere, missing)


def cases() -> Iterator[Any]:
    """(operation, operand, what is wrong with it) wherever that is wrong."""
    for op, case in OPS.items():
        for operand in case.operands:
            for fault in FAULTS:
                is_fine = {
                    wrong_type: case.any_type and operand == "x",
                    without_its_first_dimension: case.any_rank and operand == "x",
                    narrower: operand in case.leads,
                    missing: operand in case.optional,
                }
                if not is_fine.get(fault, False):
                    yield pytest.param(op, operand, fault, id=f"{op}-{operand}-{fault.__name__}")


@pytest.mark.parametrize(("op", "operand", "fault"), list(cases()))
def test_what_does_not_fit_is_named(op: str, operand: str, fault: Callable[[Tensor], Any]) -> None:
    case = OPS[op]
    with pytest.raises(ValueError, match=f"^{op}: {operand} is .*; it must be "):
        case.run(**{operand: fault(case.operands[operand])})


def as_plain(x: Tensor) -> Tensor:
    return x.as_subclass(Plain)


@pytest.mark.parametrize("form", [Tensor.clone, Tensor.numpy, as_plain])
@pytest.mark.parametrize("op", [op for op in OPS if not hasattr(native.Comm, op)])
def test_what_fits_is_taken_from_torch_and_numpy(op: str, form: Callable[[Tensor], Any]) -> None:
    OPS[op].run(**{name: form(x) for name, x in OPS[op].operands.items()})


def test_all_bound_functions_are_in_the_table() -> None:
    bound = {name for holder in (native, native.DecoderStage, native.Comm) for name in dir(holder)}
    bound = {name for name in bound if name[0] != "_" and not name[0].isupper()}
    without_tensors = {
        "num_threads",
        "set_num_threads",
        "set_cores",
        "set_spin_us",
        "isa",
        "best_isa",
        "isas",
        "set_isa",
    }
    assert bound - without_tensors - {"abort", "barrier"} == set(OPS)


WRONG: list[tuple[str, str, Operands]] = [
    ("rope_and_cache", "cos_sin is .* at most 8 wide", {"cos_sin": torch.zeros(9, 10)}),
    ("rope_and_cache", "v_cache is float16", {"v_cache": CACHES["v_cache"].half()}),
    ("rope_and_cache", "k is float32 .3, 4, 8.", {"k": torch.ones(T, 4, D)}),
    ("rope_and_cache", "q is .* heads of a token side by side", {"q": torch.ones(4, T, D).transpose(0, 1)}),
    ("paged_attention", "3 query heads are no multiple of the cache's 2", {"q": torch.ones(T, 3, D)}),
    ("paged_attention", "out is float32 .2, 32.", {"out": torch.zeros(2, Q)}),
    ("paged_attention", "context_len is int32 .3.", {"context_len": ints(1, 1, 1)}),
    ("rope_cache_attention", "qkv is .* of heads of 8 values, 4 of them", {"qkv": torch.ones(T, 2 * KV)}),
    ("rope_cache_attention", "qkv is .* of heads of 8 values, 4 of them", {"qkv": torch.ones(T, Q + 2 * KV + 1)}),
    ("pack_weight", "kind 17, n 2, k 32", {"kind": 17}),
    ("pack_weight", "kind 3, n 2, k 33", {"k": 33}),
    ("quantize_weight", "nothing is rounded to kind 0", {"kind": 0}),
    ("sample_rows", "best_ids is .* 1 to 65 wide", {"best_ids": torch.zeros(T, 66, dtype=torch.int32)}),
    ("sample_rows", "jobs is .* multiple of 8 bytes", {"jobs": raw(T * native.SAMPLE_JOB_BYTES + 1)[1:]}),
    ("sample_rows", "logits is .* not empty", {"logits": torch.ones(T, 0)}),
    ("add_layer", "o has a weight that does not take 32 inputs", {"linears": {"o": weight(H, Q + 1)}}),
    ("add_layer", "down has 5 outputs; it must have 6", {"linears": {"down": weight(H - 1, F)}, "down bias": None}),
    ("add_layer", "q_norm and k_norm must be given", {"k_norm": None}),
    (
        "bind_kv",
        "caches of 1 heads of 8 values; the stage has 2 of 8",
        {"k_cache": torch.zeros(5, 1, D, S), "v_cache": torch.zeros(5, 1, S, D)},
    ),
    (
        "bind_kv",
        "even head_dim and block_size, not 8 and 3",
        {
            "k_cache": torch.zeros(5, 2, D + 4, 3, dtype=torch.int8),
            "v_cache": torch.zeros(5, 2, 3, D + 4, dtype=torch.int8),
        },
    ),
    ("run", "hidden is float32 .2, 6.", {"hidden": torch.zeros(T - 1, H)}),
    ("all_gather", "out is float32 .2, 6.* of 3 rows", {"out": torch.zeros(2, 6)}),
    ("all_gather", "out is int32 .* of the type of x", {"out": torch.zeros(T, 6, dtype=torch.int32)}),
]


@pytest.mark.parametrize(("op", "told", "other"), WRONG, ids=[f"{op}-{i}" for i, (op, *_) in enumerate(WRONG)])
def test_what_does_not_belong_together_is_told(op: str, told: str, other: Operands) -> None:
    with pytest.raises(ValueError, match=f"{op}: .*{told}"):
        OPS[op].run(**other)


def test_a_stage_takes_as_many_caches_as_it_has_layers() -> None:
    stage = add_layer(**LAYER)
    caches = CACHES["k_cache"], CACHES["v_cache"]
    with pytest.raises(ValueError, match="bind_kv: 2 caches for 1 layers"):
        stage.bind_kv([caches, caches])
    add_layer(stage=stage, **LAYER)
    with pytest.raises(ValueError, match="bind_kv: cache 1 is unlike the first"):
        stage.bind_kv([caches, tuple(cache.half() for cache in caches)])
    buffers = [torch.zeros(T, width) for width in BUFFERS.values()]
    with pytest.raises(ValueError, match="run: bind_kv comes first"):
        stage.run(list(STEP.values()), buffers)


def test_a_rank_has_columns_of_its_own() -> None:
    with create_arena(Mesh(1, 1, 2), 8, 8, 8) as arena:
        comm = native.Comm(arena.path, 1, 0, 1.0, 1.0)
        with pytest.raises(ValueError, match=r"x is float32 \[3, 2\].* of 4 columns"):
            comm.all_gather(torch.zeros(T, 2), torch.zeros(T, 6), [2, 4])
        with pytest.raises(ValueError, match="there are 1, and none for rank 1"):
            comm.reduce_scatter(torch.zeros(T, 2), torch.zeros(T, 2), [2])


def test_bfloat16_of_numpy_is_its_bits() -> None:
    bits = {name: np.zeros(x.shape, np.uint16) for name, x in CACHES.items()}
    OPS["rope_and_cache"].run(**bits)
    bfloat16 = {name: x.bfloat16() for name, x in CACHES.items()}
    OPS["rope_and_cache"].run(**bfloat16)
    for name, x in bfloat16.items():
        assert (x.view(torch.int16).numpy().view(np.uint16) == bits[name]).all()


def test_only_tensors_are_taken() -> None:
    with pytest.raises(TypeError, match="a tensor is needed, not int"):
        OPS["rms_norm"].run(weight=1)
