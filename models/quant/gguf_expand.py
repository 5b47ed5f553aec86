"""Expands GGUF block types to float32, vectorised over blocks. Called at load for types that no kernel computes with."""

from __future__ import annotations

from torch import Tensor

from models.quant.base import Raw


def dequantize(kind: str, raw: Raw, n: int, k: int) -> Tensor:
    """float32 [n, k]. Raises ModelError for a type that has no expansion here (EXPANDABLE lists those that have)."""
    raise NotImplementedError
