"""Operands that do not fit are refused before a launch, by an error that names them. Skipped without a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers import moe_ops

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA GPU"),
]
ROWS, HIDDEN = 4, 128


def half(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.bfloat16)


def floats(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda")


def ints(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.int32)


def raw(*shape: int) -> Tensor:
    return torch.zeros(*shape, device="cuda", dtype=torch.uint8)


def cache() -> ops.CudaPagedKV:
    return ops.CudaPagedKV(half(3, 2, 16, 64), half(3, 2, 16, 64))


def _norm(**other: Any) -> None:
    given = {"x": half(ROWS, HIDDEN), "weight": half(HIDDEN), "eps": 1e-5, "out": half(ROWS, HIDDEN)} | other
    ops.rms_norm(**given)


def _quantize(**other: Any) -> None:
    narrow = half(ROWS, HIDDEN).to(torch.float8_e4m3fn)
    ops.quantize_rows(**({"x": half(ROWS, HIDDEN), "out": narrow, "scale": floats(ROWS)} | other))


def _rotary(**other: Any) -> None:
    given = {"qkv": half(ROWS, 8 * 64), "q_heads": 4, "kv": cache(), "cos_sin": floats(32, 64)}
    ops.rotary_and_cache(**(given | {"positions": ints(ROWS), "slots": ints(ROWS)} | other))


def _decode(**other: Any) -> None:
    given = {"q": half(ROWS, 4 * 64), "q_heads": 4, "kv": cache(), "block_table": ints(ROWS, 2)}
    given |= {"context_len": ints(ROWS), "scale": 1.0, "out": half(ROWS, 4 * 64)}
    ops.decode_attention(**(given | other))


def _gated(**other: Any) -> None:
    ops.gated_activation(**({"gate_up": half(ROWS, 2 * HIDDEN), "out": half(ROWS, HIDDEN), "gate": "silu"} | other))


def _skinny(**other: Any) -> None:
    ops.skinny_linear(**({"x": half(ROWS, HIDDEN), "weight": half(64, HIDDEN), "out": half(ROWS, 64)} | other))


def _int8(**other: Any) -> None:
    x, weight = raw(ROWS, HIDDEN).view(torch.int8), raw(64, HIDDEN).view(torch.int8)
    given = {"x": x, "x_scale": floats(ROWS), "weight": weight, "scale": floats(64), "out": half(ROWS, 64)}
    ops.skinny_int8(**(given | other))


def _blocks(**other: Any) -> None:
    given = {"x": half(1, 512), "weight": raw(8, 2 * 272), "out": half(1, 8), "form": "q8_0"}
    ops.block_linear(**(given | other))


def _w4(**other: Any) -> None:
    given = {"x": half(ROWS, HIDDEN), "codes": raw(64, HIDDEN // 2), "groups": ints(1, 64), "out": half(ROWS, 64)}
    ops.skinny_w4(**(given | other))


def _gather(**other: Any) -> None:
    ops.gather_rows(**({"table": half(10, HIDDEN), "ids": ints(ROWS), "out": half(ROWS, HIDDEN)} | other))


def _sample(**other: Any) -> None:
    jobs = torch.from_numpy(np.zeros(ROWS, ops.JOB).view(np.uint8)).cuda()
    ops.sample_rows(
        **({"logits": floats(ROWS, 50), "jobs": jobs, "positions": ints(ROWS), "tokens": ints(ROWS)} | other)
    )


def _route(**other: Any) -> None:
    moe_ops.route_experts(**({"logits": half(ROWS, 8), "chosen": ints(ROWS, 2), "scores": floats(ROWS, 2)} | other))


def _mix(**other: Any) -> None:
    moe_ops.mix_experts(**({"results": half(ROWS, 2, 64), "scores": floats(ROWS, 2), "out": half(ROWS, 64)} | other))


# What each is given in the place of an operand that fits, and the operand that the error names.
CASES: list[tuple[Callable[..., None], str, dict[str, Callable[[], Any]]]] = [
    (_norm, "weight is float32", {"weight": lambda: floats(HIDDEN)}),
    (_norm, "weight is None", {"weight": lambda: None}),
    (_norm, "out is bfloat16 .3, 128.", {"out": lambda: half(3, HIDDEN)}),
    (_norm, "x is .* strides .1, 4.", {"x": lambda: half(HIDDEN, ROWS).T}),
    (_norm, "residual is", {"residual": lambda: half(ROWS, 64)}),
    (_norm, "must be on a GPU", {"weight": lambda: half(HIDDEN).cpu()}),
    (_norm, "multiples of 16 bytes", {"x": lambda: half(ROWS, HIDDEN + 1)[:, 1:]}),
    (_quantize, "scale is float32 .3.", {"scale": lambda: floats(ROWS - 1)}),
    (_quantize, "scale is None", {"scale": lambda: None}),
    (_quantize, "out is bfloat16", {"out": lambda: half(ROWS, HIDDEN)}),
    (_rotary, "qkv is", {"q_heads": lambda: 5}),
    (_rotary, "slots is int32 .3.", {"slots": lambda: ints(ROWS - 1)}),
    (_rotary, "positions is int64", {"positions": lambda: ints(ROWS).long()}),
    (_decode, "out is bfloat16 .3, 256.", {"out": lambda: half(ROWS - 1, 4 * 64)}),
    (_decode, "scratch is None", {"splits": lambda: 2}),
    (_decode, "no multiple of the cache's 2", {"q_heads": lambda: 3}),
    (_gated, "x is bfloat16 .4, 128.", {"gate_up": lambda: half(ROWS, HIDDEN)}),
    (_gated, "largest is", {"largest": lambda: floats(ROWS - 1)}),
    (_skinny, "x is bfloat16 .64, 128.", {"x": lambda: half(64, HIDDEN), "weight": lambda: half(64, HIDDEN)}),
    (_skinny, "weight is float32", {"weight": lambda: floats(64, HIDDEN)}),
    (_skinny, "scale is float32 .3.", {"scale": lambda: floats(3)}),
    (_int8, "x_scale is", {"x_scale": lambda: floats(ROWS - 1)}),
    (_int8, "weight is uint8", {"weight": lambda: raw(64, HIDDEN)}),
    (_blocks, "blocks of 272 bytes", {"weight": lambda: raw(8, 528)}),
    (_w4, "groups is int32 .1, 32.", {"groups": lambda: ints(1, 32)}),
    (_gather, "ids is int32 .3.", {"ids": lambda: ints(ROWS - 1)}),
    (_gather, "out is", {"out": lambda: half(ROWS, 64)}),
    (_sample, "jobs is uint8", {"jobs": lambda: raw(8)}),
    (_sample, "tokens is int32 .3.", {"tokens": lambda: ints(ROWS - 1)}),
    (_route, "scores is bfloat16", {"scores": lambda: half(ROWS, 2)}),
    (_route, "chosen is float32", {"chosen": lambda: floats(ROWS, 2)}),
    (_mix, "scores is float32 .2, 4.", {"scores": lambda: floats(2, ROWS)}),
]


@pytest.mark.parametrize(
    ("call", "told", "other"), CASES, ids=[f"{case[0].__name__[1:]}-{i}" for i, case in enumerate(CASES)]
)
def test_what_does_not_fit_is_named(call: Callable[..., None], told: str, other: dict[str, Callable[[], Any]]) -> None:
    with pytest.raises(ValueError, match=told):
        call(**{name: make() for name, make in other.items()})


def test_what_fits_is_taken() -> None:
    for call in (_norm, _quantize, _rotary, _decode, _gated, _skinny, _int8, _w4, _gather, _route, _mix):
        call()
    torch.cuda.synchronize()


def test_only_tensors_are_taken() -> None:
    with pytest.raises(TypeError, match="a tensor is needed, not int"):
        _norm(weight=1)
