"""Collectives between the workers of one engine, behind models.forward.Group. Only workers import this."""

from __future__ import annotations

from typing import TYPE_CHECKING

from trireme.errors import ConfigError
from trireme.models.forward import Group, SoloGroup
from trireme.topology.mesh import Mesh

if TYPE_CHECKING:
    from trireme.workers.collectives.cuda import CudaGroup


def make_group(mesh: Mesh, arena: str, *, timeout_s: float = 15.0, step_timeout_s: float = 60.0) -> Group:
    """The group of worker `mesh`: none needed, shared memory (`arena` from trireme.topology.arena), or gloo (tcp:// or file://).

    Raises ConfigError without an arena, CollectiveError when it cannot be used.
    """
    if mesh.num_workers == 1:
        return SoloGroup()
    _need_arena(mesh, arena)
    if arena.startswith(("tcp://", "file://")):
        from trireme.workers.collectives.gloo import GlooGroup

        return GlooGroup(arena, mesh, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
    from trireme.workers.collectives.shm import ShmGroup

    return ShmGroup(arena, mesh, timeout_s=timeout_s, step_timeout_s=step_timeout_s)


def make_cuda_group(mesh: Mesh, arena: str, num_gpus: int, *, gathered_bytes: int, load_timeout_s: float) -> CudaGroup:
    """The group of worker `mesh`, one of several whose tensors are on GPUs. Ranks wait `load_timeout_s` for each other's weights.

    Raises as make_group.
    """
    from trireme.workers.collectives.cuda import CudaGroup
    from trireme.workers.collectives.shm import ShmGroup

    _need_arena(mesh, arena)
    host = ShmGroup(arena, mesh, timeout_s=load_timeout_s, step_timeout_s=load_timeout_s)
    return CudaGroup(mesh, host, num_gpus, gathered_bytes=gathered_bytes)


def _need_arena(mesh: Mesh, arena: str) -> None:
    if not arena:
        raise ConfigError(f"worker {mesh.worker} of {mesh.num_workers} was given no arena to meet the others in")
