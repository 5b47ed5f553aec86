"""Chooses the CPU runtime of a model's layers: one native call for a whole stage, or torch. Pure and torch-free.

Called by the worker (models/load) and by the budget, since a process without torch is a good deal smaller.
"""

from __future__ import annotations

from trireme.config import Decision
from trireme.model.spec import ArchSpec
from trireme.topology.mesh import Mesh

TORCH = "torch"


def choose_runtime(arch: ArchSpec, mesh: Mesh) -> Decision:
    """The runtime of a rank's layers. A worker imports torch for "torch", and to communicate with other workers."""
    if arch.family == "stub":
        return Decision("runtime", "stub, no torch", "it has no layers")
    if arch.body is not None:
        return Decision("runtime", TORCH, f"the native stage does not know the layers of {arch.family}")
    if mesh.tp > 1:
        return Decision("runtime", TORCH, f"{mesh.tp} workers share each layer")
    if not _is_covered(arch):
        return Decision("runtime", TORCH, f"the native stage does not know the norms of {arch.family}")
    if mesh.pp > 1:
        return Decision("runtime", "native", "all layers of a stage run in one native call")
    return Decision("runtime", "native, no torch", "all layers run in one native call")


def _is_covered(arch: ArchSpec) -> bool:
    """Whether the native stage (csrc/cpu/decoder.h) supports every operation of a Llama-like model."""
    is_plain = arch.norm_kind == "rms" and arch.norm_placement != "parallel"
    return is_plain and not (arch.qk_norm and arch.qk_norm_kind == "heads")
