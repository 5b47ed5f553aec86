"""Checks redundant checkpoint tensors (rotary frequencies) against the settings they derive from. Called by models/load.

The other checks of a file against its config.json: models/weights/sources compares names and shapes,
trireme/model/stored_facts the output head and the dtype.
"""

from __future__ import annotations

import msgspec
import numpy as np

from trireme.errors import ModelError
from trireme.model.reader import ArchSpec
from trireme.models.arch.rope import inverse_frequencies
from trireme.models.weights.sources import WeightSource

_FREQUENCIES = "rotary_emb.inv_freq"
_RELATIVE, _ABSOLUTE = 0.02, 1e-6  # precision of frequencies stored in 16 bits


def check_frequencies(source: WeightSource, arch: ArchSpec) -> None:
    """Raises ModelError if stored rotary frequencies match the settings neither with nor without scaling."""
    names = sorted(name for name in source.names() if name.endswith(_FREQUENCIES))
    if not names:
        return
    plain = msgspec.structs.replace(arch.rope, kind="default")
    derived = [
        inverse_frequencies(spec) for spec in (arch.rope, plain) if spec.kind != "longrope" or spec.short_factors
    ]
    for name in names:
        stored = source.vector(name, arch.rope.dim // 2)
        if not any(np.allclose(stored, each, rtol=_RELATIVE, atol=_ABSOLUTE) for each in derived):
            raise ModelError(
                f"{name} in {source.path} has other frequencies than the rotary settings give: the last one is "
                f"{stored[-1]:.3g}, not {derived[0][-1]:.3g}",
                hint="correct rope_theta or the rope scaling in config.json, or remove the tensor",
            )
