"""Quantized inputs and unscaled outputs of linear layers on the GPU. Used by models/cuda/decoder."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers.protocol import LinearLayer, empty_quantized_like


class Product(NamedTuple):
    """Output of a linear layer: `values`, times `scales` if those are left to the reader."""

    values: Tensor
    scales: ops.Scales | None = None


class QuantizedInput(NamedTuple):
    """Quantized input of a linear layer: one-byte values [T, k] times scale [T] float32."""

    values: Tensor
    scale: Tensor


def narrowed(linear: LinearLayer, x: Tensor, largest: Tensor | None) -> Tensor | QuantizedInput:
    """x, quantized if `linear` takes quantized input; `largest` is its per-token amax [T] if known."""
    dtype = linear.input_dtype(x.shape[0])
    if dtype is None:
        return x
    narrow, scale = empty_quantized_like(x, dtype)
    return QuantizedInput(ops.quantize_rows(x, narrow, scale, largest), scale)


def multiply(linear: LinearLayer, x: Tensor | QuantizedInput, out: Tensor) -> Tensor:
    """Applies a linear layer to x with all scales, into `out`."""
    return linear(x, out) if isinstance(x, Tensor) else linear.forward_quantized(x.values, x.scale, out)
