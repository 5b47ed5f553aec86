"""What goes into a product on the GPU and what comes out of it, when either is rounded to one byte. Used by models/cuda/decoder."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.layers.protocol import LinearLayer, empty_quantized_like


class Product(NamedTuple):
    """What a linear layer has written, times `scales` where it leaves those to the reader."""

    values: Tensor
    scales: ops.Scales | None = None


class QuantizedInput(NamedTuple):
    """Inputs of a product, rounded: values [T, k] of one byte each, times scale [T] float32."""

    values: Tensor
    scale: Tensor


def narrowed(linear: LinearLayer, x: Tensor, largest: Tensor | None) -> Tensor | QuantizedInput:
    """x as `linear` wants it; `largest` are its rows' largest magnitudes, where they are known."""
    dtype = linear.input_dtype(x.shape[0])
    if dtype is None:
        return x
    narrow, scale = empty_quantized_like(x, dtype)
    return QuantizedInput(ops.quantize_rows(x, narrow, scale, largest), scale)


def multiply(linear: LinearLayer, x: Tensor | QuantizedInput, out: Tensor) -> Tensor:
    """The product of x with all its scales."""
    return linear(x, out) if isinstance(x, Tensor) else linear.forward_quantized(x.values, x.scale, out)
