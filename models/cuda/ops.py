"""The CUDA kernels (csrc/cuda) as functions of tensors. Called by models/arch and workers for tensors on a GPU.

Every function launches on the current stream and returns without waiting, and nothing allocates, so all can be captured in a
graph. Tensors go to the extension as they are: it checks types, shapes, strides and alignment (csrc/bind/cuda*.cpp) and raises
ValueError naming the operand that does not fit. models/cuda/reference.py has each in plain torch.

Legend: T tokens, H hidden, Hq query heads, Hk KV heads, D head dim, R rows, M rows of x, F ffn width, V vocabulary.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trireme.errors import ConfigError

GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
Q4_K_VALUES, Q4_K_BYTES = 256, 144  # of one super-block
Q4_K_INT8_ROWS = 1
BLOCKS = {"q4_k": 0, "q5_k": 1, "q6_k": 2, "q8_0": 3, "q4_0": 4, "q4_1": 5, "q5_0": 6, "q5_1": 7, "iq4_nl": 8}
BLOCK_VALUES = 256
BLOCK_BYTES = dict(zip(BLOCKS, (144, 176, 224, 272, 144, 160, 176, 192, 144), strict=True))  # of so many values
FP8_MAX = 448.0
INT8_MAX = 127.0
INT8_ROWS = 64  # of x, up to which skinny_int8 exists
JOB = np.dtype(
    [
        ("seed", np.uint64),
        ("temperature", np.float64),
        ("top_p", np.float64),
        ("min_depth", np.float64),
        ("record", np.uint64),  # address; 0: no rules
        ("choice", np.int32),
        ("top_k", np.int32),
        ("is_greedy", np.int32),
        ("only_allowed", np.int32),
        ("num_listed", np.int32),
        ("num_words", np.int32),
        ("ends_from", np.int32),
        ("repetition_penalty", np.float32),
        ("frequency_penalty", np.float32),
        ("presence_penalty", np.float32),
        ("unused", np.int32),
        ("num_logprobs", np.int32),
    ]
)
MOST_LOGPROBS = 21  # the token's own, and those of the likeliest
LOGPROB_WORDS = 1 + 2 * MOST_LOGPROBS  # of a row: rank, ids, then float32 values
OUTPUTS = 2**27 - 1  # of a mark in a record of rules; its other bits:
COMPLETES, IN_PROMPT, BARRED, ALLOWED, LISTED = (1 << bit for bit in range(27, 32))
MOST_WORD = 8  # tokens of a sequence that must not be completed
NOT_FINITE = -2  # what sample_rows gives for a row whose logits hold NaN or +inf, or nothing finite
NOTHING_LEFT = -3  # and where its rules bar every token

_native: Any = None


def load() -> Any:
    """The extension. Raises ConfigError where it was not built."""
    global _native
    if _native is None:
        try:
            _native = importlib.import_module("trireme.models._cuda")
        except ImportError as error:
            raise ConfigError(
                f"the CUDA extension trireme.models._cuda does not load: {error}", hint="make native"
            ) from error
    return _native


@dataclass(slots=True)
class CudaPagedKV:
    """Cache of one layer on a GPU: k and v [blocks, Hk, block_size, D]; float8 holds value / scale."""

    k: Tensor
    v: Tensor
    k_scale: float = 1.0
    v_scale: float = 1.0
    _native: Any = field(default=None, init=False, repr=False, compare=False)
    _native_of: tuple[int, int] = field(default=(0, 0), init=False, repr=False, compare=False)

    @property
    def sides(self) -> tuple[tuple[Tensor, float], tuple[Tensor, float]]:
        """Keys and values, each with its scale."""
        return (self.k, self.k_scale), (self.v, self.v_scale)

    @property
    def native(self) -> Any:
        """What the kernels take; valid while the tensors live."""
        at = self.k.data_ptr(), self.v.data_ptr()
        if self._native is None or self._native_of != at:
            self._native = load().PagedCache(self.k, self.v, self.k_scale, self.v_scale)
            self._native_of = at
        return self._native


class Scales(NamedTuple):
    """What a product of float8 leaves to its reader: its values are meant times that of their row and that of their column."""

    rows: Tensor  # [T] float32
    columns: Tensor  # [width] float32


def _stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


# ---------------------------------------------------------------- norms


def rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    offset: float = 0.0,
    scales: Scales | None = None,
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * (weight + offset) of x [T, H] into `out` (may be x). With `residual` [T, H]: residual += x
    first, rounded to its dtype, and the norm is of the sum. `scales` are x's."""
    load().rms_norm(x, weight, None, eps, out, residual, offset, None, scales, _stream())
    return out


def rms_norm_narrow(
    x: Tensor,
    weight: Tensor,
    eps: float,
    out: Tensor,
    scale: Tensor,
    *,
    residual: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """As rms_norm, rounded as quantize_rows does: out [T, H] times scale [T] float32 is the result."""
    load().rms_norm(x, weight, None, eps, out, residual, 0.0, scale, scales, _stream())
    return out


def layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    *,
    residual: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """(x - mean) / sqrt(variance + eps) * weight + bias; otherwise as rms_norm."""
    load().layer_norm(x, weight, bias, eps, out, residual, 0.0, None, scales, _stream())
    return out


def layer_norm_narrow(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    scale: Tensor,
    *,
    residual: Tensor | None = None,
    scales: Scales | None = None,
) -> Tensor:
    """As layer_norm, rounded as quantize_rows does: out [T, H] times scale [T] float32 is the result."""
    load().layer_norm(x, weight, bias, eps, out, residual, 0.0, scale, scales, _stream())
    return out


def quantize_rows(x: Tensor, out: Tensor, scale: Tensor, largest: Tensor | None = None) -> Tensor:
    """x [T, H] in the type of out, float8 e4m3 or int8: out [T, H] times scale [T] float32, which is the row's largest magnitude
    / 448 or / 127. A row of int8 that is not finite has a scale of NaN. Whoever made x may have noted `largest` [T] float32, the
    magnitudes: then up to 65535 rows are rounded without a look at all of each."""
    load().quantize_rows(x, out, scale, largest, _stream())
    return out


# ---------------------------------------------------------------- rotary embedding and cache write


def rotary_and_cache(
    qkv: Tensor,
    q_heads: int,
    kv: CudaPagedKV,
    cos_sin: Tensor,
    positions: Tensor,
    slots: Tensor,
    *,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    eps: float = 1e-6,
    scales: Scales | None = None,
) -> None:
    """Of the fused product qkv [T, (Hq + 2 Hk) * D]: rotates q and k in place (NeoX pairing), writes k and v into the cache.
    `scales` are those of qkv; they are applied to it.

    cos_sin [max_position, rotary] float32: cosines, then sines; rows may be one row. positions, slots [T] int32; a negative
    slot writes nothing there.
    q_norm, k_norm [D]: RMS norm of each head before rotation.
    """
    load().rotary_and_cache(qkv, q_heads, kv.native, cos_sin, positions, slots, q_norm, k_norm, eps, scales, _stream())


# ---------------------------------------------------------------- attention of one query per row


def decode_attention(
    q: Tensor,
    q_heads: int,
    kv: CudaPagedKV,
    block_table: Tensor,
    context_len: Tensor,
    scale: float,
    out: Tensor,
    *,
    window: int = 0,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    splits: int = 1,
    scratch: Tensor | None = None,
    largest: Tensor | None = None,
) -> Tensor:
    """Attention of row r's one query over the first context_len[r] tokens of its blocks. q [R, >= Hq * D], out [R, Hq * D].

    The cache is of q's type or float8; head dims are 64, 96, 128, 256, and 80 in q's type. context_len 0 marks padding: its
    output is zero. `splits` parts of a context run side by side; more than one needs `scratch`, float32 of decode_scratch(...)
    values. sinks [Hq] float32 are logits that take weight and give nothing. The table, the lengths and all tokens but the newest
    are read before the kernel ahead has ended: since they were written, one of torch's or gather_rows must have been launched.
    `largest` [R] float32: see gated_activation.
    """
    load().decode_attention(
        q,
        q_heads,
        kv.native,
        block_table,
        context_len,
        scale,
        out,
        window,
        softcap,
        sinks,
        splits,
        scratch,
        largest,
        _stream(),
    )
    return out


def decode_scratch(rows: int, q_heads: int, dim: int, splits: int) -> int:
    """Floats of scratch that decode_attention needs."""
    return int(load().decode_scratch_floats(rows, q_heads, dim, splits))


# ---------------------------------------------------------------- products and the rest


def skinny_linear(
    x: Tensor,
    weight: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    scale: Tensor | None = None,
    ways: int = 0,
) -> Tensor:
    """out [M, N] = x [M, K] W^T * scale + bias, for M up to skinny_max_rows().

    `weight` is [N, K] of x's type or of float8 (64 divides K), or uint8 [N, K / 256 * 144]: rows of GGUF's Q4_K super-blocks.
    scale [N] or [1] float32 multiplies the outputs. `ways` says how many warps share a row of blocks (1, 2, 4, 8; 0: chosen); it
    changes the order of sums. Where it is 0, up to Q4_K_INT8_ROWS rows meet Q4_K as int8 with a scale for each run of 32 values:
    each x moves by its run's largest / 254 at most, an output by the sum of that times |w|.
    """
    load().skinny_linear(x, weight, out, bias, scale, ways, _stream())
    return out


def skinny_max_rows() -> int:
    """Rows of x up to which skinny_linear exists."""
    return int(load().skinny_max_rows())


def fp8_linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, scale: Tensor) -> Tensor:
    """out [M, N] = x [M, K] (weight [N, K] * scale [N])^T + bias, M up to fp8_linear_rows(K), the weight of float8, x of 16 bits.

    Each row of x, which begins at a multiple of 16 bytes, keeps 8 bits of all values within 2^-13 of its largest.
    """
    load().fp8_linear(x, weight, scale, out, bias, _stream())
    return out


def fp8_linear_rows(k: int) -> int:
    """Rows of k values up to which fp8_linear exists; 0 on a card that is no Hopper."""
    return int(load().fp8_linear_rows(k))


def skinny_int8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    out: Tensor,
    bias: Tensor | None = None,
    *,
    ways: int = 0,
) -> Tensor:
    """out [M, N] = (x [M, K] W^T) * (scale [N] * x_scale [M]) + bias of int8 x and weight [N, K], for M up to INT8_ROWS, 16 divides
    K. Sums are exact; their scaling and the bias are rounded to float32 step by step, and then to out's type of 16 bits. `ways` is
    how many warps share a row of weights (1, 2, 4, 8; 0: chosen)."""
    load().skinny_int8(x, x_scale, weight, scale, out, bias, ways, _stream())
    return out


def scale_int8(sums: Tensor, x_scale: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of sums [M, N] int32, contiguous; 4 divides N."""
    load().scale_int8(sums, x_scale, scale, out, bias, _stream())
    return out


def expand_q4_k(blocks: Tensor, out: Tensor) -> Tensor:
    """Rows of Q4_K super-blocks, uint8 [N, K / 256 * 144], as values: out [N, K] of 16 bits, contiguous as both are."""
    load().expand_q4_k(blocks, out, _stream())
    return out


def block_linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, form: str) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias for M up to block_linear_rows. `weight` is uint8 [N, K / 256 * BLOCK_BYTES[form]], rows of
    super-blocks of one of BLOCKS as models/cuda/weights/gguf_blocks lays them out.

    x is rounded to int8 with a scale for each run of 32 values: each x moves by its run's largest / 254 at most, an output by the
    sum of that times |w|.
    """
    load().block_linear(x, weight, out, bias, BLOCKS[form], _stream())
    return out


def block_linear_rows(form: str, n: int, k: int) -> int:
    """Rows of x that block_linear takes at a time on the current card, 4 if not for very long ones; 0 for none."""
    return int(load().block_linear_rows(BLOCKS[form], n, k))


def expand_blocks(blocks: Tensor, out: Tensor, *, form: str) -> Tensor:
    """Rows of super-blocks, uint8 [N, K / 256 * BLOCK_BYTES[form]], as values: out [N, K] of 16 bits, contiguous as both are."""
    load().expand_blocks(blocks, out, BLOCKS[form], _stream())
    return out


def skinny_w4(x: Tensor, codes: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias for M up to skinny_max_rows(), W of 4-bit codes: uint8 [N, K / 2] in the order that
    models.cuda.layers.quantize.w4_layout gives them; groups [K / 32, 64 or 128, N] int32 are a float16 scale and a zero in 16
    bits each. 128 divides K."""
    load().skinny_w4(x, codes, groups, out, bias, _stream())
    return out


def expand_w4(codes: Tensor, groups: Tensor, out: Tensor) -> Tensor:
    """The values of such a weight: out [N, K] of 16 bits, contiguous; columns of `groups` may be those of a larger one."""
    load().expand_w4(codes, groups, out, _stream())
    return out


def skinny_fp8_blocks(x: Tensor, weight: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias for M up to skinny_max_rows(), weight [N, K] float8 times groups [K / 128, N] float32."""
    load().skinny_fp8_blocks(x, weight, groups, out, bias, _stream())
    return out


def expand_fp8_blocks(weight: Tensor, groups: Tensor, out: Tensor) -> Tensor:
    """The values of such a weight, as expand_w4 gives them."""
    load().expand_fp8_blocks(weight, groups, out, _stream())
    return out


def gated_activation(
    gate_up: Tensor, out: Tensor, gate: str, scales: Scales | None = None, largest: Tensor | None = None
) -> Tensor:
    """act(gate) * up, where gate_up [T, 2 F] holds the gate columns, then the up columns; `gate` is a key of GATES. `scales` are
    those of gate_up. `largest` [T] float32, zeros at first, becomes the largest magnitude of each row of out, for quantize_rows."""
    load().gated_activation(gate_up, out, GATES[gate], scales, largest, _stream())
    return out


def activation(
    x: Tensor, out: Tensor, gate: str, scales: Scales | None = None, largest: Tensor | None = None
) -> Tensor:
    """act(x) of x [T, F], which `out` may be, for networks without a gate. `scales` are those of x; `largest` as above."""
    load().activation(x, out, GATES[gate], scales, largest, _stream())
    return out


def gather_rows(
    table: Tensor, ids: Tensor, out: Tensor, *, first: int = 0, count: int | None = None, scale: float = 1.0
) -> Tensor:
    """out [T, H] = table[ids - first] * scale; rows of ids outside [first, first + count) are zero."""
    load().gather_rows(table, ids, out, first, -1 if count is None else count, scale, _stream())
    return out


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copies blocks pairs[i] = (source, destination), int32 on the GPU, of cache [blocks, ...]; no destination is a source."""
    load().copy_blocks(cache, pairs, _stream())


def touched_words(vocab: int) -> int:
    """Words of bits at the beginning of a record of rules; then a mark for each token, pairs of token and bias, sequences of
    MOST_WORD tokens, and the row's last MOST_WORD - 1 tokens."""
    return -(-vocab // 32)


def sample_rows(
    logits: Tensor,
    jobs: Tensor,
    positions: Tensor,
    tokens: Tensor,
    *,
    slots: Tensor | None = None,
    logprobs: Tensor | None = None,
) -> Tensor:
    """Draws tokens [R] int32 from logits [R, V]. jobs: bytes of JOB entries on the GPU, row i has job slots[i] (i without
    slots; negative: none is drawn). positions [R] int32: index of each new token. NOT_FINITE where logits are not, NOTHING_LEFT
    where the rules bar all. A job's record of rules (csrc/cuda/ops.h) takes note of the token.
    logprobs [R, LOGPROB_WORDS] int32 are those of rows that get a token and whose jobs ask for some."""
    load().sample_rows(logits, jobs, positions, tokens, slots, logprobs, _stream())
    return tokens
