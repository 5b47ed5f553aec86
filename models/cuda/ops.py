"""The CUDA kernels (csrc/cuda) as functions of tensors. Called by models/arch and workers for tensors on a GPU.

Every function launches on the current stream and returns without waiting, and nothing allocates, so all can be captured in a
graph. The kernels refuse types and shapes that they do not have (ValueError). models/cuda/reference.py has each in plain torch.

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

TYPE_CODES = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2, torch.float8_e4m3fn: 3, torch.int8: 4}
GATES = {"silu": 0, "gelu_tanh": 1, "gelu": 2, "relu": 3}
DENSE, FP8, Q4_K = 0, 1, 2  # what the weights of skinny_linear are made of
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
            _, heads, block_size, dim = self.k.shape
            code = TYPE_CODES[self.k.dtype]
            self._native = load().PagedCache(*at, code, self.k_scale, self.v_scale, heads, dim, block_size)
            self._native_of = at
        return self._native


class Scales(NamedTuple):
    """What a product of float8 leaves to its reader: its values are meant times that of their row and that of their column."""

    rows: Tensor  # [T] float32
    columns: Tensor  # [width] float32


def _addresses(scales: Scales | None) -> tuple[int, int]:
    return (0, 0) if scales is None else (scales.rows.data_ptr(), scales.columns.data_ptr())


def _stream() -> int:
    return torch._C._cuda_getCurrentRawStream(torch._C._cuda_getDevice())


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


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
    return _norm(load().rms_norm, x, weight, None, eps, out, residual, offset, None, scales)


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
    return _norm(load().rms_norm, x, weight, None, eps, out, residual, 0.0, scale, scales)


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
    return _norm(load().layer_norm, x, weight, bias, eps, out, residual, 0.0, None, scales)


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
    return _norm(load().layer_norm, x, weight, bias, eps, out, residual, 0.0, scale, scales)


def _norm(
    op: Any,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    out: Tensor,
    residual: Tensor | None,
    offset: float,
    scale: Tensor | None,
    scales: Scales | None,
) -> Tensor:
    op(
        x.data_ptr(),
        x.stride(0),
        _addresses(scales),
        _address(residual),
        0 if residual is None else residual.stride(0),
        weight.data_ptr(),
        out.data_ptr(),
        out.stride(0),
        *x.shape,
        eps,
        offset,
        TYPE_CODES[x.dtype],
        _address(scale),
        TYPE_CODES[out.dtype],
        _address(bias),
        _stream(),
    )
    return out


def quantize_rows(x: Tensor, out: Tensor, scale: Tensor, largest: Tensor | None = None) -> Tensor:
    """x [T, H] in the type of out, float8 e4m3 or int8: out [T, H] times scale [T] float32, which is the row's largest magnitude
    / 448 or / 127. A row of int8 that is not finite has a scale of NaN. Whoever made x may have noted `largest` [T] float32, the
    magnitudes: then up to 65535 rows are rounded without a look at all of each."""
    load().quantize_rows(
        x.data_ptr(),
        x.stride(0),
        out.data_ptr(),
        out.stride(0),
        *x.shape,
        TYPE_CODES[x.dtype],
        scale.data_ptr(),
        TYPE_CODES[out.dtype],
        _address(largest),
        _stream(),
    )
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
    _, kv_heads, _, dim = kv.k.shape
    stride, size = qkv.stride(0), qkv.element_size()
    k = qkv.data_ptr() + q_heads * dim * size
    v = k + kv_heads * dim * size
    load().rotary_and_cache(
        qkv.data_ptr(),
        stride,
        k,
        stride,
        v,
        stride,
        TYPE_CODES[qkv.dtype],
        cos_sin.data_ptr(),
        cos_sin.stride(0),
        cos_sin.shape[1],
        positions.data_ptr(),
        slots.data_ptr(),
        _address(q_norm),
        _address(k_norm),
        _addresses(scales),
        qkv.shape[0],
        q_heads,
        eps,
        kv.native,
        _stream(),
    )


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
        q.data_ptr(),
        q.stride(0),
        out.data_ptr(),
        out.stride(0),
        TYPE_CODES[q.dtype],
        block_table.data_ptr(),
        block_table.stride(0),
        context_len.data_ptr(),
        block_table.shape[0],
        q_heads,
        scale,
        window,
        softcap,
        _address(sinks),
        kv.native,
        splits,
        _address(scratch),
        _address(largest),
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
    kind = {torch.uint8: Q4_K, torch.float8_e4m3fn: FP8}.get(weight.dtype, DENSE)
    load().skinny_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        kind,
        _address(scale),
        int(scale is not None and scale.numel() > 1),
        out.data_ptr(),
        out.stride(0),
        _address(bias),
        x.shape[0],
        weight.shape[0],
        weight.shape[1] // Q4_K_BYTES * Q4_K_VALUES if kind == Q4_K else weight.shape[1],
        TYPE_CODES[out.dtype],
        ways,
        _stream(),
    )
    return out


def skinny_max_rows() -> int:
    """Rows of x up to which skinny_linear exists."""
    return int(load().skinny_max_rows())


def fp8_linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, scale: Tensor) -> Tensor:
    """out [M, N] = x [M, K] (weight [N, K] * scale [N])^T + bias, M up to fp8_linear_rows(K), the weight of float8, x of 16 bits.

    Each row of x, which begins at a multiple of 16 bytes, keeps 8 bits of all values within 2^-13 of its largest.
    """
    load().fp8_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        scale.data_ptr(),
        _address(bias),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        weight.shape[0],
        weight.shape[1],
        TYPE_CODES[out.dtype],
        _stream(),
    )
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
    load().skinny_int8(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        weight.shape[1],
        x_scale.data_ptr(),
        scale.data_ptr(),
        _address(bias),
        out.data_ptr(),
        out.stride(0),
        x.shape[0],
        weight.shape[0],
        TYPE_CODES[out.dtype],
        ways,
        _stream(),
    )
    return out


def scale_int8(sums: Tensor, x_scale: Tensor, scale: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """The same of sums [M, N] int32, contiguous; 4 divides N."""
    load().scale_int8(
        sums.data_ptr(),
        x_scale.data_ptr(),
        scale.data_ptr(),
        _address(bias),
        out.data_ptr(),
        out.stride(0),
        *sums.shape,
        TYPE_CODES[out.dtype],
        _stream(),
    )
    return out


def expand_q4_k(blocks: Tensor, out: Tensor) -> Tensor:
    """Rows of Q4_K super-blocks, uint8 [N, K / 256 * 144], as values: out [N, K] of 16 bits, contiguous as both are."""
    count = blocks.numel() // Q4_K_BYTES
    load().expand_q4_k(blocks.data_ptr(), out.data_ptr(), count, TYPE_CODES[out.dtype], _stream())
    return out


def block_linear(x: Tensor, weight: Tensor, out: Tensor, bias: Tensor | None = None, *, form: str) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias for M up to block_linear_rows. `weight` is uint8 [N, K / 256 * BLOCK_BYTES[form]], rows of
    super-blocks of one of BLOCKS as models/cuda/weights/gguf_blocks lays them out.

    x is rounded to int8 with a scale for each run of 32 values: each x moves by its run's largest / 254 at most, an output by the
    sum of that times |w|.
    """
    load().block_linear(
        x.data_ptr(),
        x.stride(0),
        weight.data_ptr(),
        BLOCKS[form],
        out.data_ptr(),
        out.stride(0),
        _address(bias),
        x.shape[0],
        weight.shape[0],
        weight.shape[1] // BLOCK_BYTES[form] * BLOCK_VALUES,
        TYPE_CODES[out.dtype],
        _stream(),
    )
    return out


def block_linear_rows(form: str, n: int, k: int) -> int:
    """Rows of x that block_linear takes at a time on the current card, 4 if not for very long ones; 0 for none."""
    return int(load().block_linear_rows(BLOCKS[form], n, k))


def expand_blocks(blocks: Tensor, out: Tensor, *, form: str) -> Tensor:
    """Rows of super-blocks, uint8 [N, K / 256 * BLOCK_BYTES[form]], as values: out [N, K] of 16 bits, contiguous as both are."""
    count = blocks.numel() // BLOCK_BYTES[form]
    load().expand_blocks(blocks.data_ptr(), out.data_ptr(), count, BLOCKS[form], TYPE_CODES[out.dtype], _stream())
    return out


def skinny_w4(x: Tensor, codes: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias for M up to skinny_max_rows(), W of 4-bit codes: uint8 [N, K / 2] in the order that
    models.cuda.layers.quantize.w4_layout gives them; groups [K / 32, 64 or 128, N] int32 are a float16 scale and a zero in 16
    bits each. 128 divides K."""
    return _grouped(load().skinny_w4, x, codes, groups, out, bias, codes.shape[1] * 2)


def expand_w4(codes: Tensor, groups: Tensor, out: Tensor) -> Tensor:
    """The values of such a weight: out [N, K] of 16 bits, contiguous; columns of `groups` may be those of a larger one."""
    return _grouped(load().expand_w4, None, codes, groups, out, None, codes.shape[1] * 2)


def skinny_fp8_blocks(x: Tensor, weight: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None = None) -> Tensor:
    """out [M, N] = x [M, K] W^T + bias for M up to skinny_max_rows(), weight [N, K] float8 times groups [K / 128, N] float32."""
    return _grouped(load().skinny_fp8_blocks, x, weight, groups, out, bias, weight.shape[1])


def expand_fp8_blocks(weight: Tensor, groups: Tensor, out: Tensor) -> Tensor:
    """The values of such a weight, as expand_w4 gives them."""
    return _grouped(load().expand_fp8_blocks, None, weight, groups, out, None, weight.shape[1])


def _grouped(op: Any, x: Tensor | None, w: Tensor, groups: Tensor, out: Tensor, bias: Tensor | None, k: int) -> Tensor:
    op(
        _address(x),
        0 if x is None else x.stride(0),
        w.data_ptr(),
        groups.data_ptr(),
        groups.stride(0),
        k // groups.shape[0],
        out.data_ptr(),
        out.stride(0),
        _address(bias),
        0 if x is None else x.shape[0],
        w.shape[0],
        k,
        TYPE_CODES[out.dtype],
        _stream(),
    )
    return out


def gated_activation(
    gate_up: Tensor, out: Tensor, gate: str, scales: Scales | None = None, largest: Tensor | None = None
) -> Tensor:
    """act(gate) * up, where gate_up [T, 2 F] holds the gate columns, then the up columns; `gate` is a key of GATES. `scales` are
    those of gate_up. `largest` [T] float32, zeros at first, becomes the largest magnitude of each row of out, for quantize_rows."""
    return _activation(load().gated_activation, gate_up, out, gate, scales, largest)


def activation(
    x: Tensor, out: Tensor, gate: str, scales: Scales | None = None, largest: Tensor | None = None
) -> Tensor:
    """act(x) of x [T, F], which `out` may be, for networks without a gate. `scales` are those of x; `largest` as above."""
    return _activation(load().activation, x, out, gate, scales, largest)


def _activation(op: Any, x: Tensor, out: Tensor, gate: str, scales: Scales | None, largest: Tensor | None) -> Tensor:
    op(
        x.data_ptr(),
        x.stride(0),
        _addresses(scales),
        out.data_ptr(),
        out.stride(0),
        *out.shape,
        GATES[gate],
        TYPE_CODES[x.dtype],
        _address(largest),
        _stream(),
    )
    return out


def gather_rows(
    table: Tensor, ids: Tensor, out: Tensor, *, first: int = 0, count: int | None = None, scale: float = 1.0
) -> Tensor:
    """out [T, H] = table[ids - first] * scale; rows of ids outside [first, first + count) are zero."""
    load().gather_rows(
        table.data_ptr(),
        ids.data_ptr(),
        out.data_ptr(),
        *out.shape,
        first,
        table.shape[0] if count is None else count,
        scale,
        TYPE_CODES[table.dtype],
        _stream(),
    )
    return out


def copy_blocks(cache: Tensor, pairs: Tensor) -> None:
    """Copies blocks pairs[i] = (source, destination), int32 on the GPU, of cache [blocks, ...]; no destination is a source."""
    block_bytes = cache[0].numel() * cache.element_size()
    load().copy_blocks(cache.data_ptr(), pairs.data_ptr(), pairs.shape[0], block_bytes, _stream())


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
    rows, vocab = logits.shape
    load().sample_rows(
        logits.data_ptr(),
        logits.stride(0),
        TYPE_CODES[logits.dtype],
        rows,
        vocab,
        jobs.data_ptr(),
        _address(slots),
        positions.data_ptr(),
        tokens.data_ptr(),
        _address(logprobs),
        _stream(),
    )
    return tokens
