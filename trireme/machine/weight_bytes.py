"""Bytes of a model's weights once loaded: types that no kernel reads are expanded, dense ones may be quantized or widened. Called
by resolve and by `trireme plan`; reads headers, never weights."""

from __future__ import annotations

from collections import Counter

from trireme.config import Decision, ModelConfig
from trireme.machine.gpu_formats import Stored, stored_in
from trireme.machine.memory_budget import DTYPE_BYTES, num_matrix_rows, num_params
from trireme.model.files import ModelFiles
from trireme.model.gguf_header import LOADED_AS, read_gguf
from trireme.model.packed_ints import Packing
from trireme.model.reader import ArchSpec
from trireme.model.stored import safetensors_files, size_of
from trireme.sizes import format_bytes

SCHEME_BYTES = {"q8_0": 34 / 32, "int8": 1, "q4_0": 18 / 32}  # per parameter
SCHEME_ROW_BYTES = {"q8_0": 0, "int8": 8, "q4_0": 0}  # and per output


def stored_of(files: ModelFiles) -> Stored | None:
    """Tensor types of a GGUF file; None for other models."""
    return stored_in(read_gguf(files.path, arrays=False).tensors) if files.kind == "gguf" else None


def stored_bytes(files: ModelFiles) -> tuple[int, Decision | None]:
    """Bytes of the files, with expanded types at their loaded size, and the Decision that reports those."""
    if files.kind == "safetensors":
        # only the indexed files: some checkpoints are stored twice, under other names
        has_any = any(files.path.glob("*.safetensors"))  # (dummy weights need none)
        return sum(size_of(path) for path in safetensors_files(files.path)) if has_any else 0, None
    if files.kind != "gguf":
        return 0, None
    size = files.path.stat().st_size
    expanded = [tensor for tensor in read_gguf(files.path, arrays=False).tensors.values() if tensor.kind in LOADED_AS]
    if not expanded:
        return size, None
    before, after = sum(t.nbytes for t in expanded), sum(t.loaded_bytes for t in expanded)
    kinds = Counter(tensor.kind for tensor in expanded)
    shown = ", ".join(f"{count} {kind} as {LOADED_AS[kind]}" for kind, count in sorted(kinds.items()))
    because = (
        f"no kernel computes with these types: {format_bytes(before)} in the file, {format_bytes(after)} in memory"
    )
    return size + after - before, Decision("weights", shown, because)


def _packed_bytes(model: ModelConfig, arch: ArchSpec, packing: Packing) -> int:
    """Layers as packed, except those that become float32 under --dtype or --quantize; embedding and head likewise."""
    ends = arch.vocab_size * arch.hidden * (1 if arch.tie_embeddings else 2)
    asked = DTYPE_BYTES.get(model.dtype) if model.quantize is None else SCHEME_BYTES[model.quantize]
    inside = packing.cpu_bytes if asked is None or not packing.is_scattered else asked
    of_ends = DTYPE_BYTES.get(arch.weights_dtype, 2) if asked is None else asked
    return round((num_params(arch) - ends) * inside + ends * of_ends)


def loaded_bytes(model: ModelConfig, arch: ArchSpec, size: int) -> int:
    """Bytes of one copy of the weights in memory, from the file bytes that `stored_bytes` counts."""
    if model.load_format == "dummy":
        size = num_params(arch) * DTYPE_BYTES.get(arch.weights_dtype, 2)
    elif arch.source == "gguf":
        return size
    elif arch.packing is not None:
        return _packed_bytes(model, arch, arch.packing)
    if model.quantize is not None:
        per_row = SCHEME_ROW_BYTES[model.quantize]
        return round(num_params(arch) * SCHEME_BYTES[model.quantize]) + num_matrix_rows(arch) * per_row
    if arch.weights_kind.startswith("FP8"):
        return 2 * num_params(arch)  # expanded: no CPU kernel computes with float8
    if model.dtype in DTYPE_BYTES and arch.weights_dtype in DTYPE_BYTES:
        return size * DTYPE_BYTES[model.dtype] // DTYPE_BYTES[arch.weights_dtype]
    return size
