"""Which quantized safetensors checkpoints can be loaded: int8 and float8 weights of compressed-tensors (its `int-quantized` and
`float-quantized` formats), and float8 ones of Hugging Face's `fp8` and `fbgemm_fp8`. Called by trireme.model.hf_config.

int8 has a scale per tensor or per channel, and activations quantized to int8 per token; float8 has a scale per tensor, per
channel or per block of 128 x 128, and activations quantized as the device does it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trireme.errors import ModelError

FP8_BLOCK = 128  # inputs and outputs that share a scale
_INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
_FP8 = {"num_bits": 8, "type": "float", "symmetric": True}
# Required values of a config_group, by the matrix kind it gives; activations may stay dense where a part is not named.
_WANTED: dict[str, dict[str, dict[str, Any]]] = {
    "INT8": {
        "weights": {**_INT8, "strategy": ("channel", "tensor")},
        "input_activations": {**_INT8, "dynamic": True, "strategy": "token"},
    },
    "FP8": {"weights": {**_FP8, "strategy": ("channel", "tensor")}},
    "FP8_BLOCKS": {"weights": {**_FP8, "strategy": "block", "block_structure": [FP8_BLOCK, FP8_BLOCK]}},
}


def check_quantized(config: Mapping[str, object], where: Path) -> str:
    """The matrix kind that a `quantization_config` describes: INT8, FP8 or FP8_BLOCKS (of 128 x 128). Raises ModelError for what
    no kernel supports; `where` is the path of config.json."""
    method = config.get("quant_method", "unknown")
    if method in ("fp8", "fbgemm_fp8"):
        return _kind_of_fp8(config, where)
    if method != "compressed-tensors":
        raise ModelError(
            f"{where} has quantized weights ({method}); dense safetensors, GPTQ, AWQ, compressed-tensors, fp8 and GGUF are "
            "supported",
            hint="use a GGUF file of this model, or its unquantized checkpoint",
        )
    misfits = {kind: _misfit(config, wanted) for kind, wanted in _WANTED.items()}
    fitting = next((kind for kind, misfit in misfits.items() if not misfit), "")
    if not fitting:
        likely = _likely_kind(config)
        raise ModelError(
            f"{where} has compressed-tensors weights with {misfits[likely]}; supported are int8 weights with a symmetric scale for "
            "the tensor or each channel and activations quantized to int8 for each token, and float8 weights with a scale for the "
            "tensor, each channel or each block of 128 x 128",
            hint="use the unquantized checkpoint with --quantize int8, or a GGUF file of this model",
        )
    return fitting


def _kind_of_fp8(config: Mapping[str, object], where: Path) -> str:
    block = config.get("weight_block_size")
    if block not in (None, [FP8_BLOCK, FP8_BLOCK]):
        raise ModelError(
            f"{where} has fp8 weights with a scale for each block of {block}; 128 x 128 is supported",
            hint="use a GGUF file of this model, or its unquantized checkpoint",
        )
    return "FP8" if block is None else "FP8_BLOCKS"


def _likely_kind(config: Mapping[str, object]) -> str:
    """The kind that an unsupported config is closest to."""
    text = str(config.get("config_groups"))
    if "'float'" not in text:
        return "INT8"
    return "FP8_BLOCKS" if "'block'" in text else "FP8"


def _misfit(config: Mapping[str, object], parts: Mapping[str, Mapping[str, Any]]) -> str:
    """The first unsupported setting of a compressed-tensors config, "" when there is none."""
    if config.get("kv_cache_scheme") is not None:
        return "a scheme for the KV cache"
    if config.get("transform_config"):
        return "transforms"
    sparsity = config.get("sparsity_config")
    if isinstance(sparsity, Mapping) and sparsity.get("format", "dense") != "dense":
        return f"sparse weights ({sparsity['format']})"
    groups = config.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        return "no config_groups"
    for name, group in groups.items():
        if isinstance(group, Mapping) and group.get("output_activations"):
            return f"output_activations of {name}"
        for part, wanted in parts.items():
            have = group.get(part) if isinstance(group, Mapping) else None
            have = have if isinstance(have, Mapping) else {}
            for key, value in wanted.items():
                known = value if isinstance(value, tuple) else (value,)
                if have.get(key) not in known:
                    return f"{key} {have.get(key)!r} of the {part} of {name}, not {' or '.join(map(repr, known))}"
    return ""
