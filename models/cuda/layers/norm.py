"""RMS and layer norms on the GPU behind one call, fused with the residual add. Built by models/cuda/layer_weights."""

from __future__ import annotations

from torch import Tensor

from trireme.models.cuda import ops
from trireme.models.cuda.ops import Scales


class CudaNorm:
    """Norm over the last dim of x [T, H], with weight [H]; layer norms may have a bias [H]."""

    __slots__ = ("_bias", "_eps", "_is_rms", "_weight")

    def __init__(self, weight: Tensor, bias: Tensor | None, eps: float, *, is_rms: bool) -> None:
        self._weight, self._bias, self._eps, self._is_rms = weight, bias, eps, is_rms

    def __call__(
        self, x: Tensor, out: Tensor, *, residual: Tensor | None = None, scales: Scales | None = None
    ) -> Tensor:
        """The norm, into `out`, which may be x. With `residual`: residual += x, then the norm of the sum. `scales` apply to x."""
        if self._is_rms:
            return ops.rms_norm(x, self._weight, self._eps, out, residual=residual, scales=scales)
        return ops.layer_norm(x, self._weight, self._bias, self._eps, out, residual=residual, scales=scales)

    def narrow(
        self,
        x: Tensor,
        out: Tensor,
        scale: Tensor,
        *,
        residual: Tensor | None = None,
        scales: Scales | None = None,
    ) -> Tensor:
        """Like __call__, quantized to the one-byte dtype of `out` with `scale` [T] per token."""
        if self._is_rms:
            return ops.rms_norm_narrow(x, self._weight, self._eps, out, scale, residual=residual, scales=scales)
        return ops.layer_norm_narrow(
            x, self._weight, self._bias, self._eps, out, scale, residual=residual, scales=scales
        )
