"""Loads the experts of a layer onto a GPU: from the file's layout to one 16-bit tensor per grouped GEMM.

Called by models/cuda/layer_weights. One expert at a time is on the device in its stored form: dense [inputs, outputs], or MXFP4.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from trireme.errors import ModelError
from trireme.machine.gpu_support import EXPERT_UNIT
from trireme.model.bodies import MoeBody
from trireme.model.reader import ArchSpec
from trireme.models.cuda.layers.moe import ExpertWeights
from trireme.models.cuda.weights.sources import DeviceWeights
from trireme.models.weights.layouts import MXFP4_VALUES_PER_BLOCK, gate_up_rows
from trireme.topology.mesh import Span

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def load_experts(
    source: DeviceWeights, at: str, arch: ArchSpec, own: Span, dtype: torch.dtype, *, adds_bias: bool
) -> ExpertWeights:
    """The experts of the network `at`, column-sharded to `own`. Biases added after the all-reduce are zero unless `adds_bias`.
    Raises ModelError for a shard size that the kernels do not support."""
    body, hidden, ffn = arch.body, arch.hidden, arch.ffn
    assert isinstance(body, MoeBody)
    if own.size % EXPERT_UNIT:
        raise ModelError(
            f"{at}: a rank's share of experts of {ffn} columns is {own.size}, no multiple of {EXPERT_UNIT}",
            hint="another --tp",
        )
    rows = torch.from_numpy(gate_up_rows(own, ffn, interleaved=body.glu_limit > 0)).cuda()
    if body.expert_names:
        return _separate(source, at, body, (own.size, hidden), dtype)
    shapes = (body.num_experts, 2 * own.size, hidden), (body.num_experts, hidden, own.size)
    gate_up, down = (torch.empty(shape, dtype=dtype, device="cuda") for shape in shapes)
    for i, matrix in enumerate(_matrices(source, f"{at}.experts.gate_up_proj", body, 2 * ffn, hidden)):
        gate_up[i] = matrix[rows]
    for i, matrix in enumerate(_matrices(source, f"{at}.experts.down_proj", body, hidden, ffn)):
        down[i] = matrix[:, own.start : own.stop]
    if not body.biases:
        return ExpertWeights(gate_up, down)
    wide = _biases(source, f"{at}.experts.gate_up_proj_bias", body.num_experts, 2 * ffn, dtype)
    narrow = _biases(source, f"{at}.experts.down_proj_bias", body.num_experts, hidden, dtype)
    return ExpertWeights(gate_up, down, wide[:, rows].contiguous(), narrow if adds_bias else torch.zeros_like(narrow))


def _separate(
    source: DeviceWeights, at: str, body: MoeBody, sizes: tuple[int, int], dtype: torch.dtype
) -> ExpertWeights:
    """Experts whose matrices are stored separately; the source yields this rank's shard of each."""
    (ffn, hidden), (gate, up, down), count = sizes, body.expert_names, body.num_experts
    found = ExpertWeights(
        torch.empty(count, 2 * ffn, hidden, dtype=dtype, device="cuda"),
        torch.empty(count, hidden, ffn, dtype=dtype, device="cuda"),
    )
    for i in range(count):
        expert = f"{at}.experts.{i}."
        found.gate_up[i, :ffn] = source.matrix(f"{expert}{gate}.weight", ffn, hidden)
        found.gate_up[i, ffn:] = source.matrix(f"{expert}{up}.weight", ffn, hidden)
        found.down[i] = source.matrix(f"{expert}{down}.weight", hidden, ffn)
    return found


def _matrices(source: DeviceWeights, name: str, body: MoeBody, n: int, k: int) -> Iterator[Tensor]:
    """The matrix [n, k] of each expert."""
    count = body.num_experts
    if not body.mxfp4:
        yield from (stored.T for stored in source.experts(name, (count, k, n)))
        return
    if k % MXFP4_VALUES_PER_BLOCK:
        raise ModelError(f"{name} has rows of {k} values, no multiple of {MXFP4_VALUES_PER_BLOCK}")
    shape = (count, n, k // MXFP4_VALUES_PER_BLOCK)
    blocks, scales = source.experts(name + "_blocks", (*shape, 16)), source.experts(name + "_scales", shape)
    yield from (mxfp4_values(*both) for both in zip(blocks, scales, strict=True))


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantizes MXFP4 to float32 [n, k]: `blocks` [n, k / 32, 16] of code pairs, low nibble first, `scales` [n, k / 32] of
    exponents."""
    table = torch.tensor([*_E2M1, *(-value for value in _E2M1)], device=blocks.device)
    codes = torch.stack((blocks & 15, blocks >> 4), -1).flatten(2)
    powers = (scales.int() << 23).view(torch.float32)
    return (table[codes.int()] * powers.unsqueeze(-1)).flatten(1)


def _biases(source: DeviceWeights, name: str, count: int, n: int, dtype: torch.dtype) -> Tensor:
    return torch.stack(list(source.experts(name, (count, n)))).to(dtype)
