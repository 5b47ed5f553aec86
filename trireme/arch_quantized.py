"""Which quantized safetensors checkpoints can be loaded: int8 weights with a scale for each channel and activations that are
rounded to int8 for each token, in the form of compressed-tensors (its `int-quantized` format). Called by trireme.arch_hf.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from trireme.errors import ModelError

_BYTES = {"num_bits": 8, "type": "int", "symmetric": True}
_WANTED = {
    "weights": {**_BYTES, "strategy": "channel"},
    "input_activations": {**_BYTES, "strategy": "token", "dynamic": True},
}


def check_quantized(config: Mapping[str, object], where: Path) -> None:
    """Raises ModelError unless a `quantization_config` describes what the int8 kernels compute; `where` is the config.json."""
    method = config.get("quant_method", "unknown")
    if method != "compressed-tensors":
        raise ModelError(
            f"{where} has quantized weights ({method}); dense safetensors, int8 of compressed-tensors and GGUF are supported",
            hint="use a GGUF file of this model, or its unquantized checkpoint",
        )
    misfit = _misfit(config)
    if misfit:
        raise ModelError(
            f"{where} has compressed-tensors weights with {misfit}; supported are int8 weights with a symmetric scale for each "
            "channel and activations rounded to int8 for each token",
            hint="use the unquantized checkpoint with --quantize int8, or a GGUF file of this model",
        )


def _misfit(config: Mapping[str, object]) -> str:
    """The first thing of a compressed-tensors config that the kernels do not compute, "" when there is none."""
    if config.get("kv_cache_scheme") is not None:
        return "a scheme for the KV cache"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"sparse weights ({sparsity['format']})"
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "no config_groups"
    for name, group in groups.items():
        for part, wanted in _WANTED.items():
            have = group.get(part) if isinstance(group, Mapping) else None
            have = have if isinstance(have, Mapping) else {}
            for key, value in wanted.items():
                if have.get(key) != value:
                    return f"{key} {have.get(key)!r} of the {part} of {name}, not {value!r}"
    return ""
