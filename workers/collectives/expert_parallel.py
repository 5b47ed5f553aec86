"""Lockstep peers of this engine, as its Runner uses them: agree on a step, then exchange tokens of the experts.

Made by workers.cpu.worker for a model whose experts are split over several engines.
"""

from __future__ import annotations

from typing import Any

from trireme.models.cpu.tensors import OverTensors
from trireme.models.forward import Model
from trireme.topology.lockstep import Agreed, Ballot
from trireme.topology.mesh import Mesh
from trireme.workers.collectives.experts import SplitExperts
from trireme.workers.collectives.lockstep import Peers


class ExpertParallelPeers:
    """Implements runner.LockstepPeers. `experts` goes into the model, which `join` brings back here."""

    def __init__(self, arena: str, mesh: Mesh, *, timeout_s: float) -> None:
        self._peers = Peers(arena, mesh.dp_rank, mesh.dp, timeout_s=timeout_s)
        self.experts = SplitExperts(self._peers)
        self.abort = self._peers.abort
        self._model: OverTensors | None = None

    def join(self, model: Model) -> None:
        assert isinstance(model, OverTensors)
        self._model = model

    def meet(self, ballot: Ballot | None, num_tokens: int, num_pieces: int) -> Agreed:
        agreed = self._peers.agree(ballot, num_tokens, num_pieces)
        self.experts.num_tokens = agreed.num_tokens
        return agreed

    def dummy_forward(self) -> None:
        assert self._model is not None
        self._model.dummy_forward()

    def facts(self) -> dict[str, Any]:
        """Steps taken in lockstep, and a checksum over what was agreed in them."""
        return {"collectives": self._peers.num_steps, "trace": self._peers.trace}
