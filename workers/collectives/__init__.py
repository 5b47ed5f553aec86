"""Ways for the workers of one engine to compute together, behind models.forward.Group. Only workers import this."""

from __future__ import annotations

from models.forward import Group, SoloGroup
from trireme.errors import ConfigError
from trireme.mesh import Mesh


def make_group(mesh: Mesh, arena: str, *, timeout_s: float = 15.0, step_timeout_s: float = 60.0) -> Group:
    """The group of worker `mesh`: none needed, shared memory (`arena` from trireme.arena), or gloo (tcp:// or file://).

    Raises ConfigError without an arena, CollectiveError when it cannot be used.
    """
    if mesh.num_workers == 1:
        return SoloGroup()
    if not arena:
        raise ConfigError(f"worker {mesh.worker} of {mesh.num_workers} was given no arena to meet the others in")
    if arena.startswith(("tcp://", "file://")):
        from workers.collectives.gloo import GlooGroup

        return GlooGroup(arena, mesh, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
    from workers.collectives.shm import ShmGroup

    return ShmGroup(arena, mesh, timeout_s=timeout_s, step_timeout_s=step_timeout_s)
