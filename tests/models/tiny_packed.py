"""Turns tiny dense checkpoints into GPTQ, AWQ and compressed-tensors ones, written place by place as those formats say, beside a
dense twin that holds the values which the packed one stands for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from tests.models.tiny import make_tiny

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that lies at each place of a word


def packed_words(codes: np.ndarray, bits: int, order: tuple[int, ...] | None = None) -> np.ndarray:
    """Codes [a, b] as int32 words [a, b * bits / 32] along the second dim."""
    per_word = 32 // bits
    words = np.zeros((codes.shape[0], codes.shape[1] // per_word), np.uint32)
    for place in range(per_word):
        which = place if order is None else order[place]
        words |= codes[:, which::per_word].astype(np.uint32) << np.uint32(place * bits)
    return words.view(np.int32)


def gptq_config(bits: int = 4, group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "sym": False, "desc_act": False, **more}


def awq_config(group: int = 32, **more: Any) -> dict[str, Any]:
    return {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm", **more}


def compressed_config(bits: int = 4, group: int = 32, *, sym: bool = True, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": "int", "symmetric": sym, "strategy": "group", "group_size": group, **more}
    if group < 0:
        weights |= {"strategy": "channel", "group_size": None}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


class Rounded:
    """A dense matrix [n, k] rounded to codes with a scale and a zero for each group of inputs."""

    def __init__(self, dense: torch.Tensor, bits: int, group: int, *, sym: bool, seed: int, scattered: bool) -> None:
        n, k = dense.shape
        size = k if group < 0 else group
        rng = np.random.default_rng(seed)
        groups = -(-k // size)
        self.group_of = np.arange(k) // size
        if scattered:
            rng.shuffle(self.group_of)
        most = (1 << bits) - 1
        values = dense.float().numpy()
        self.scales = np.empty((n, groups), np.float16)
        self.zeros = np.empty((n, groups), np.uint8)
        self.codes = np.empty((n, k), np.uint8)
        for at in range(groups):
            part = values[:, self.group_of == at]
            low, high = np.minimum(part.min(1), 0), np.maximum(part.max(1), 0)
            if sym:
                high = np.maximum(high, -low)
                low = -high
            self.scales[:, at] = np.maximum((high - low) / most, 1e-4)
            zero = np.full(n, 1 << (bits - 1)) if sym else np.round(-low / self.scales[:, at].astype(np.float32))
            self.zeros[:, at] = np.clip(zero, 0, most)
            steps = np.round(part / self.scales[:, at, None].astype(np.float32)) + self.zeros[:, at, None]
            self.codes[:, self.group_of == at] = np.clip(steps, 0, most)

    def exact(self) -> np.ndarray:
        """[n, k] in float64."""
        steps = self.codes.astype(np.float64) - self.zeros[:, self.group_of]
        return np.asarray(steps * self.scales[:, self.group_of].astype(np.float64))


def tensors_of(stem: str, matrix: Rounded, config: dict[str, Any]) -> dict[str, torch.Tensor]:
    """What a checkpoint of this config has in place of `stem`.weight."""
    method = config["quant_method"]
    if method == "compressed-tensors":
        (group,) = config["config_groups"].values()
        bits = group["weights"]["num_bits"]
        found = {
            "weight_packed": packed_words(matrix.codes, bits),
            "weight_scale": matrix.scales,
            "weight_shape": np.array(matrix.codes.shape, np.int64),
        }
        if not group["weights"]["symmetric"]:
            found["weight_zero_point"] = packed_words(matrix.zeros.T, bits).T
        if group["weights"].get("actorder") == "group":
            found["weight_g_idx"] = matrix.group_of.astype(np.int32)
    elif method == "awq":
        found = {
            "qweight": packed_words(matrix.codes.T, 4, AWQ_ORDER),
            "qzeros": packed_words(matrix.zeros.T, 4, AWQ_ORDER),
            "scales": matrix.scales.T,
        }
    else:
        bits, offset = config["bits"], int(config.get("checkpoint_format", "gptq") == "gptq")
        stored = (matrix.zeros.T - np.uint8(offset)) & np.uint8((1 << bits) - 1)
        found = {
            "qweight": packed_words(matrix.codes, bits).T,
            "qzeros": packed_words(stored, bits),
            "scales": matrix.scales.T,
            "g_idx": matrix.group_of.astype(np.int32),
        }
    return {f"{stem}.{part}": torch.from_numpy(np.ascontiguousarray(array)) for part, array in found.items()}


def make_packed(directory: Path, config: dict[str, Any], *, biases: bool = False, **changes: Any) -> tuple[Path, Path]:
    """(packed checkpoint, its dense float32 twin). `biases` adds those of zeros that some writers leave."""
    shape = {"hidden_size": 128, "intermediate_size": 320, "num_attention_heads": 4, "num_key_value_heads": 2}
    packed = make_tiny(directory / "packed", **{**shape, "head_dim": 32, **changes})
    dense = make_tiny(directory / "dense", **{**shape, "head_dim": 32, **changes})
    weights, twin = load_file(packed / "model.safetensors"), load_file(dense / "model.safetensors")
    if config["quant_method"] == "compressed-tensors":
        told = next(iter(config["config_groups"].values()))["weights"]
        bits, group, sym = told["num_bits"], told["group_size"] or -1, told["symmetric"]
        scattered = told.get("actorder") == "group"
    else:
        bits, group, sym = config["bits"], config["group_size"], config.get("sym", False)
        scattered = config.get("desc_act", False) and group > 0
    for seed, name in enumerate([name for name in weights if "_proj.weight" in name]):
        matrix = Rounded(weights.pop(name), bits, group, sym=sym, seed=seed, scattered=scattered)
        stem = name.removesuffix(".weight")
        weights |= tensors_of(stem, matrix, config)
        if biases:
            weights[stem + ".bias"] = torch.zeros(len(matrix.codes), dtype=torch.float16)
        exact = matrix.exact()
        twin[name] = torch.from_numpy(exact).float().contiguous()
        assert (twin[name].double().numpy() == exact).all(), "float32 holds every product"
    save_file(weights, packed / "model.safetensors", metadata={"format": "pt"})
    save_file(twin, dense / "model.safetensors", metadata={"format": "pt"})
    text = json.loads((packed / "config.json").read_text())
    (packed / "config.json").write_text(json.dumps({**text, "quantization_config": config}))
    return packed, dense
