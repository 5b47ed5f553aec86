"""Stub models for tests (family "stub"): forced tokens or one fixed logits vector, through the real runner and sampler.

Built by models.load for directories whose config.json says model_type "trireme_stub". Computes nothing and writes no KV.
Settings (ArchSpec.stub): kind "script" | "const"; scripts; logits, default; delay_ms per step; nan_choice.
"""

from __future__ import annotations

import time
from typing import Literal

import msgspec
import numpy as np

from trireme.errors import ModelError
from trireme.model.reader import ArchSpec
from trireme.models.forward import Group, HostBatch, HostKV, Logits
from trireme.topology.mesh import Mesh

FORCED = 50.0  # too high for sampling noise to overcome at temperatures up to 2, low enough for a logit bias of 100


class StubSettings(msgspec.Struct, frozen=True):
    """Key "stub" of config.json. Choice c emits scripts[c % len(scripts)], then EOS forever."""

    kind: Literal["script", "const"] = "script"
    scripts: list[list[int]] = []
    logits: dict[int, float] = {}
    default: float = -10.0
    delay_ms: float = 0.0
    nan_choice: int = -1  # logits of this choice are NaN


class StubModel:
    """One stage of a stub on one rank; satisfies models.forward.Model. Stages forward token ids, so that tests can check order."""

    num_kv_layers = 1
    kv_heads = 1
    head_dim = 8

    def __init__(self, arch: ArchSpec, mesh: Mesh, group: Group) -> None:
        try:
            self._settings = msgspec.convert(arch.stub, StubSettings, strict=False)
        except msgspec.ValidationError as error:
            raise ModelError(f"config.json of the stub model: {error}") from error
        self.vocab_size = arch.vocab_size
        self._mesh = mesh
        self._group = group
        eos = arch.eos_token_ids[0] if arch.eos_token_ids else arch.vocab_size - 1
        self._scripts = _script_table(self._settings.scripts, eos)
        self._vector = np.full(self.vocab_size, self._settings.default, np.float32)
        for token, value in self._settings.logits.items():
            self._vector[token] = value

    def forward(self, batch: HostBatch, kv: list[HostKV]) -> Logits | None:
        """Logits [S, vocab] on the last stage, None elsewhere."""
        self._check_stages(batch)
        if self._settings.delay_ms:
            time.sleep(self._settings.delay_ms / 1e3)
        if not self._mesh.is_last_stage:
            return None
        row = np.searchsorted(batch.query_start, batch.logits_index, side="right") - 1
        choice = batch.choices[row]
        if self._settings.kind == "script":
            logits = self._scripted(batch, row, choice)
        else:
            logits = np.tile(self._vector, (row.size, 1))
        if self._settings.nan_choice >= 0:
            logits[choice == self._settings.nan_choice] = np.nan
        return logits

    def _scripted(self, batch: HostBatch, row: np.ndarray, choice: np.ndarray) -> Logits:
        """Zero logits over the prompt; after it, FORCED on the script's token."""
        output = batch.positions[batch.logits_index] + 1 - batch.num_prompt[row]
        last = self._scripts.shape[1] - 1
        token = self._scripts[choice % self._scripts.shape[0], output.clip(0, last)]
        logits = np.zeros((row.size, self.vocab_size), np.float32)
        logits[np.arange(row.size), token] = np.where(output >= 0, FORCED, 0.0)
        return logits

    def _check_stages(self, batch: HostBatch) -> None:
        """Receives the previous stage's token ids, asserts that they are this step's, and sends them to the next stage."""
        if self._mesh.pp == 1:
            return
        from trireme.models.cpu.tensors import receive_prev, send_next

        mine = batch.token_ids.astype(np.float32)[:, None]
        if not self._mesh.is_first_stage:
            theirs = np.empty_like(mine)
            receive_prev(self._group, theirs)
            assert np.array_equal(theirs, mine), "the previous stage computed other tokens"
        if not self._mesh.is_last_stage:
            send_next(self._group, mine)


def _script_table(scripts: list[list[int]], eos: int) -> np.ndarray:
    """[scripts, longest + 1] int64, padded with EOS."""
    longest = max((len(script) for script in scripts), default=0)
    return np.array([[*script, *[eos] * (longest + 1 - len(script))] for script in scripts or [[]]], np.int64)
