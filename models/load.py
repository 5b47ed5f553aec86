"""Builds this rank's stage of a model from its files. Called by workers; shows progress through a callback.

Names are checked before any weight is read: a missing or an unused weight is a ModelError that names it.
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
)  # modules that name weights which a DummySource has
Progress = Callable[[str, int, int], None]


def no_progress(phase: str, done: int, total: int) -> None:
    """Progress callback that shows nothing."""


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
    """This rank's stage. `dtype` is the type of dense weights (auto: as stored); quantized blocks stay as they are.

    `quantize` is a scheme of models.weights.packed.SCHEMES to which dense matrices are rounded instead.

    `max_len` is how many positions will ever be computed (default: the model's own limit; more is allowed). `runtime` is
    what choose_runtime says unless a test asks for the other one. With `dummy` the weights are noise. `experts`: only a share
    of the experts is loaded, the others are on other engines.
    `progress("weights", done, total)` counts layers, and the embedding with the head as one. Raises ModelError for files
    that do not fit together.
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
    """The weights of a model, every one there and none too many; or noise under their names. Raises ModelError for files that say
    anything else than their settings."""
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
    """The same weights under the names of the Llama-like decoder, which the GPU's body reads for every family it computes."""
    return family_named(arch.family).as_decoder(source, arch)


def open_weights(files: ModelFiles, arch: ArchSpec) -> WeightSource:
    """The weights of a model, mapped, nothing read yet."""
    family = family_named(arch.family)
    if files.kind == "gguf":
        head_dim = arch.head_dim if family.gguf_pairs else 0
        source = GgufSource(files.path, interleaved_head_dim=head_dim, special=family.gguf_names)
        return family.gguf_seen(source, arch)
    stored = SafetensorsSource(files.path)
    if arch.packing is None:
        return family.seen(stored, arch)
    return family.seen(GroupedSource(stored, arch.packing, set(family.weight_names(arch))), arch)
