"""Which code computes the layers of a model on the CPU: one native call for a whole stage, or torch. Pure and torch-free.

Asked by the worker (models/load) and by the budget, since a process without torch is a good deal smaller.
"""

from __future__ import annotations

from trireme.config import Decision
from trireme.model.spec import ArchSpec
from trireme.topology.mesh import Mesh

TORCH = "torch"


def choose_runtime(arch: ArchSpec, mesh: Mesh) -> Decision:
    """What computes the layers of a rank. A worker imports torch with "torch", and to talk to other workers."""
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
    """Whether the native stage (csrc/cpu/decoder.h) knows every step of a Llama-like model."""
    is_plain = arch.norm_kind == "rms" and arch.norm_placement != "parallel"
    return is_plain and not (arch.qk_norm and arch.qk_norm_kind == "heads")
