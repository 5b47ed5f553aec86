"""Builds this rank's stage of a model from its files. Called by workers; reports progress through a callback.

Names are checked before any weight is read: a missing or unused weight raises a ModelError that names it.
"""

from __future__ import annotations

from collections.abc import Callable

from trireme.errors import ModelError
from trireme.machine.runtime import TORCH, choose_runtime
from trireme.model.files import ModelFiles
from trireme.model.reader import ArchSpec
from trireme.models.arch.agreement import check_frequencies
from trireme.models.cpu import native_stage as native
from trireme.models.forward import ExpertGroup, Group, Model
from trireme.models.registry import family_named
from trireme.models.weights.dummy import DummySource
from trireme.models.weights.grouped_source import GroupedSource
from trireme.models.weights.sources import GgufSource, SafetensorsSource, WeightSource, check_names, dense_kind
from trireme.topology.mesh import Mesh

_DUMMIES = (
    "trireme.models.cpu.stage_weights",
    "trireme.models.cpu.moe",
)  # modules whose weight names a DummySource can fill
Progress = Callable[[str, int, int], None]


def no_progress(phase: str, done: int, total: int) -> None:
    """Progress callback that does nothing."""


def load_model(
    files: ModelFiles,
    arch: ArchSpec,
    mesh: Mesh,
    group: Group,
    dtype: str = "auto",
    progress: Progress = no_progress,
    *,
    max_len: int | None = None,
    quantize: str | None = None,
    runtime: str = "",
    dummy: bool = False,
    experts: ExpertGroup | None = None,
) -> Model:
    """Builds this rank's stage. `dtype` is the type of dense weights (auto: as stored); quantized weights keep their format.

    `quantize`, a scheme of models.weights.packed.SCHEMES, quantizes dense matrices instead.

    `max_len` bounds the positions that will be computed (default: the model's own limit; it may be exceeded). `runtime`
    overrides choose_runtime, for tests. `dummy` loads random weights. With `experts` only this engine's share of the
    experts is loaded.
    `progress("weights", done, total)` counts layers, plus one for embedding and head together. Raises ModelError for
    inconsistent files.
    """
    if arch.family == "stub":
        from trireme.models.cpu.stub import StubModel

        return StubModel(arch, mesh, group)
    source = open_checked(files, arch, dummy=dummy)
    family = family_named(arch.family)
    if dummy and family.names != _DUMMIES[0]:
        raise ModelError(f"--load-format dummy makes weights of {arch.family} on a GPU alone", hint="--device cuda")
    dense = quantize or dense_kind(dtype)
    if (runtime or choose_runtime(arch, mesh).value) != TORCH:
        return native.NativeDecoder(arch, mesh, group, source, dense=dense, progress=progress, max_len=max_len)
    from trireme.models.cpu.tensors import OverTensors

    if experts is not None:
        from trireme.models.cpu.moe import MoeModel

        return OverTensors(
            MoeModel(arch, mesh, group, source, dense=dense, progress=progress, max_len=max_len, experts=experts)
        )
    body = family.load_body()
    return OverTensors(body(arch, mesh, group, source, dense=dense, progress=progress, max_len=max_len))


def open_checked(files: ModelFiles, arch: ArchSpec, *, dummy: bool = False) -> WeightSource:
    """The weights of a model, checked for missing and unused names; with `dummy`, noise under those names. Raises ModelError
    for files that contradict their settings."""
    family = family_named(arch.family)
    if dummy:
        if family.names not in _DUMMIES:
            raise ModelError(f"--load-format dummy does not know the weights of {arch.family}")
        return DummySource(arch, family.weight_names(arch), files.path)
    source = open_weights(files, arch)
    check_names(source, family.weight_names(arch), family.ignorable_names(arch))
    check_frequencies(source, arch)
    return source


def as_decoder(source: WeightSource, arch: ArchSpec) -> WeightSource:
    """The same weights under the names of the Llama-like decoder, which the GPU body reads for every family."""
    return family_named(arch.family).as_decoder(source, arch)


def open_weights(files: ModelFiles, arch: ArchSpec) -> WeightSource:
    """The weights of a model, memory-mapped; reads headers only."""
    family = family_named(arch.family)
    if files.kind == "gguf":
        head_dim = arch.head_dim if family.gguf_pairs else 0
        source = GgufSource(files.path, interleaved_head_dim=head_dim, special=family.gguf_names)
        return family.gguf_seen(source, arch)
    stored = SafetensorsSource(files.path)
    if arch.packing is None:
        return family.seen(stored, arch)
    return family.seen(GroupedSource(stored, arch.packing, set(family.weight_names(arch))), arch)
