"""Tensors of a checkpoint that nothing reads, since they follow from its settings: whether they do. Called by models/load.

What is left of a file's say over its config.json: names and shapes are compared by models/weights/sources, the head and the
type of numbers by trireme/model/stored_facts.
"""

from __future__ import annotations

import msgspec
import numpy as np

from trireme.errors import ModelError
from trireme.model.reader import ArchSpec
from trireme.models.arch.rope import inverse_frequencies
from trireme.models.weights.sources import WeightSource

_FREQUENCIES = "rotary_emb.inv_freq"
_RELATIVE, _ABSOLUTE = 0.02, 1e-6  # what 16 bits leave of them


def check_frequencies(source: WeightSource, arch: ArchSpec) -> None:
    """Raises ModelError where stored rotary frequencies are others than those of the settings, scaled or not."""
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
