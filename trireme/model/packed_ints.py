"""Checkpoints of packed 4- and 8-bit integers: which GPTQ, AWQ and compressed-tensors `pack-quantized` formats can be loaded.

Called by trireme.model.hf_config. A weight is scale * (code - zero); scale and zero belong to a quant group of neighbouring
inputs or, with GPTQ's desc_act, of inputs anywhere in the row. models/weights/grouped reads the tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from trireme.errors import ModelError

GROUP_SIZES = (-1, 32, 64, 128)  # -1: all inputs of an output
BLOCK_SIZES = (128, 64, 32)  # inputs of a quant block in memory
_HINT = "use a GGUF file of this model, or its unquantized checkpoint"


class Packing(msgspec.Struct, frozen=True):
    """How a checkpoint packs its matrices."""

    method: Literal["gptq", "awq", "pack-quantized"]
    bits: Literal[4, 8]
    group_size: int
    is_symmetric: bool
    zero_offset: int = 0  # offset to add to stored zeros
    is_scattered: bool = False  # a quant group's inputs may be anywhere in the row

    @property
    def kind(self) -> str:
        """The matrix kind of its layers once read, unless their values do not allow it."""
        if self.is_scattered:
            return "F32"
        return "Q8_0" if self.bits == 8 else f"W4_{BLOCK_SIZES[0] if self.group_size < 0 else self.group_size}"

    @property
    def cpu_bytes(self) -> float:
        """Bytes per weight on a CPU, whose kernels take quant blocks of 32 with one fixed zero: other zeros
        need 5-bit codes."""
        if self.is_scattered:
            return 4.0
        return 34 / 32 if self.bits == 8 else (18 if self.is_symmetric else 22) / 32


def packing_of(config: Mapping[str, object], where: Path) -> Packing | None:
    """Packing described by a `quantization_config`, None if it is of another kind. Raises ModelError for an unsupported one;
    `where` is the path of config.json."""
    method = config.get("quant_method")
    if method == "gptq":
        return _gptq(config, where)
    if method == "awq":
        return _awq(config, where)
    if method == "compressed-tensors" and config.get("format") == "pack-quantized":
        return _compressed(config, where)
    return None


def _gptq(config: Mapping[str, object], where: Path) -> Packing:
    form = _one_of(config, "checkpoint_format", ("gptq", "gptq_v2"), where, default="gptq")
    for key in ("is_marlin_format", "dynamic"):
        if config.get(key):
            raise _refusal(where, key, config[key], "none")
    scattered = bool(_one_of(config, "desc_act", (False, True), where, default=False))
    group = _one_of(config, "group_size", GROUP_SIZES, where)
    return Packing(
        "gptq",
        _one_of(config, "bits", (4, 8), where),
        group,
        bool(_one_of(config, "sym", (True, False), where, default=False)),  # default: as the zeros are
        zero_offset=int(form == "gptq"),
        is_scattered=scattered and group > 0,
    )


def _awq(config: Mapping[str, object], where: Path) -> Packing:
    version = config.get("version", "gemm")
    if not isinstance(version, str) or version.lower() != "gemm":
        raise _refusal(where, "version", version, "'gemm'")
    _one_of(config, "zero_point", (True,), where, default=True)
    bits = _one_of(config, "bits", (4,), where)
    group = config.get("group_size", config.get("q_group_size"))
    return Packing("awq", bits, _one_of({"group_size": group}, "group_size", GROUP_SIZES, where), is_symmetric=False)


def _compressed(config: Mapping[str, object], where: Path) -> Packing:
    for key in ("kv_cache_scheme", "transform_config"):
        if config.get(key):
            raise _refusal(where, key, config[key], "none")
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping):
        _one_of(sparsity, "format", ("dense",), where, default="dense")
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refusal(where, "config_groups", groups, "one group")
    group = next(iter(groups.values()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping):
        raise _refusal(where, "weights of config_groups", weights, "their num_bits, strategy and group_size")
    for key in ("input_activations", "output_activations"):
        if group.get(key):
            raise _refusal(where, key, group[key], "none")
    _one_of(weights, "type", ("int",), where, default="int")
    strategy = _one_of(weights, "strategy", ("group", "channel"), where)
    size = -1 if strategy == "channel" else _one_of(weights, "group_size", GROUP_SIZES, where)
    return Packing(
        "pack-quantized",
        _one_of(weights, "num_bits", (4, 8), where),
        size,
        bool(_one_of(weights, "symmetric", (True, False), where, default=True)),
        is_scattered=weights.get("actorder") in ("group", True) and size > 0,
    )


def _one_of(config: Mapping[str, object], key: str, known: tuple[Any, ...], where: Path, default: object = None) -> Any:
    """A value of the config. Raises ModelError unless it is one of `known`."""
    value = config.get(key)
    value = default if value is None else value
    for each in known:
        if type(value) is type(each) and value == each:
            return value
    raise _refusal(where, key, value, " or ".join(map(repr, known)))


def _refusal(where: Path, key: str, value: object, supported: str) -> ModelError:
    return ModelError(f"{where}: {key} {value!r} of its packed weights; supported: {supported}", hint=_HINT)
