"""Writes the tiny models and tokenizers as GGUF files with the `gguf` package, which serves as the oracle of the format."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file

from tests.models.tiny import BOS, EOS, PAD, byte_vocab
from trireme.models.cuda.layers.quantize import q4_k_from

TOKEN_NORMAL, TOKEN_UNKNOWN, TOKEN_CONTROL, TOKEN_USER, TOKEN_BYTE = 1, 2, 3, 4, 6

_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


_ARCHS = {"mistral": "llama", "gemma3_text": "gemma3", "cohere": "command-r"}
_PAIRED = ("llama", "granite", "smollm3")  # the converter interleaves q and k rows
_NORMS_AROUND = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.qkv_proj": "attn_qkv",
    "mlp.gate_up_proj": "ffn_up",
}


def gguf_name(name: str, arch: str = "llama") -> str:
    """GGUF's name of a Hugging Face weight."""
    names = _LAYER_NAMES | (_NORMS_AROUND if arch in ("gemma2", "gemma3", "olmo2") else {})
    names |= {key: value for key, value in _NORMS_AROUND.items() if "proj" in key}
    top = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "model.norm.bias": "output_norm.bias",
        "lm_head.weight": "output.weight",
    }
    if name in top:
        return top[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, suffix = rest.rsplit(".", 1)
    return f"blk.{layer}.{names[stem]}.{suffix}"


def gguf_from_directory(
    directory: Path,
    path: Path,
    kind: str = "F32",
    *,
    kinds: dict[str, str] | None = None,
    tensors: dict[str, torch.Tensor] | None = None,
    **extra: Any,
) -> Path:
    """Converts a tiny safetensors model, with the T-byte tokenizer.

    `kind` is the type of all matrices, `kinds` of some (by the end of their GGUF name); `tensors` are added as they are
    (F32); `extra` are metadata keys with __ for a dot (llama__rope__scaling__type=...).
    """
    config = json.loads((directory / "config.json").read_text())
    arch = _ARCHS.get(config["model_type"], config["model_type"])
    writer = gguf.GGUFWriter(path, arch)
    _write_shape(writer, config)
    write_byte_vocabulary(writer, config["vocab_size"])
    for key, value in extra.items():
        _add(writer, key.replace("__", "."), value)
    weights: dict[str, torch.Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        weights |= load_file(file)
    for name, tensor in weights.items():
        array = tensor.float()
        if arch in _PAIRED and ".q_proj." in name:
            array = _pairs_from_halves(array, config["num_attention_heads"])
        if arch in _PAIRED and ".k_proj." in name:
            array = _pairs_from_halves(array, config["num_key_value_heads"])
        if arch.startswith("gemma") and "norm" in name:
            array = array + 1.0
        target = gguf_name(name, arch)
        chosen = next((value for end, value in (kinds or {}).items() if target.endswith(end)), kind)
        _add_tensor(writer, target, array.numpy(), chosen if array.ndim == 2 else "F32")
    for name, tensor in (tensors or {}).items():
        _add_tensor(writer, name, tensor.numpy(), "F32")
    _finish(writer)
    return path


def _pairs_from_halves(array: torch.Tensor, heads: int) -> torch.Tensor:
    """The row order of llama.cpp's converter: within each head, row i of both halves side by side."""
    shape = array.shape
    return array.reshape(heads, 2, shape[0] // heads // 2, *shape[1:]).transpose(1, 2).reshape(shape)


def _add_tensor(writer: gguf.GGUFWriter, name: str, array: np.ndarray, kind: str) -> None:
    kind_id = gguf.GGMLQuantizationType[kind]
    array = np.ascontiguousarray(array, dtype=np.float32)
    if kind == "F32":
        writer.add_tensor(name, array)
    elif kind == "F16":
        writer.add_tensor(name, array.astype(np.float16))
    elif kind == "Q4_K":  # which gguf-py only reads
        writer.add_tensor(name, q4_k_from(torch.from_numpy(array)).numpy(), raw_dtype=kind_id)
    else:
        writer.add_tensor(name, gguf.quants.quantize(array, kind_id), raw_dtype=kind_id)


def _write_shape(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    rope = config.get("rope_parameters") or {}
    rope = rope.get("full_attention", rope)
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    if "layer_norm_eps" in config:
        writer.add_layer_norm_eps(config["layer_norm_eps"])
    else:
        writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(rope.get("rope_theta") or config["rope_theta"])
    writer.add_rope_dimension_count(int(head_dim * rope.get("partial_rotary_factor", 1.0)))
    for key, add in (
        ("sliding_window", writer.add_sliding_window),
        ("attn_logit_softcapping", writer.add_attn_logit_softcapping),
        ("final_logit_softcapping", writer.add_final_logit_softcapping),
        ("logit_scale", writer.add_logit_scale),
        ("logits_scaling", writer.add_logit_scale),
        ("embedding_multiplier", writer.add_embedding_scale),
        ("residual_multiplier", writer.add_residual_scale),
        ("attention_multiplier", writer.add_attention_scale),
    ):
        if config.get(key) is not None:
            add(config[key])
    writer.add_vocab_size(config["vocab_size"])


def write_byte_vocabulary(writer: gguf.GGUFWriter, size: int) -> None:
    """T-byte as a byte-level BPE vocabulary.."""
    vocab = byte_vocab(size=size)
    tokens = sorted(vocab, key=lambda token: vocab[token])
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([TOKEN_CONTROL if i in (BOS, EOS, PAD) else TOKEN_NORMAL for i in range(len(tokens))])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_pad_token_id(PAD)
    writer.add_add_bos_token(False)


def write_tokenizer_gguf(
    path: Path, *, model: str, tokens: Sequence[str], kinds: Sequence[int], arch: str = "llama", **extra: Any
) -> Path:
    """A GGUF file that holds nothing but a vocabulary. `extra` are tokenizer.ggml.* keys."""
    writer = gguf.GGUFWriter(path, arch)
    writer.add_tokenizer_model(model)
    writer.add_token_list(list(tokens))
    writer.add_token_types(list(kinds))
    for key, value in extra.items():
        _add(writer, f"tokenizer.ggml.{key}", value)
    _finish(writer)
    return path


def _add(writer: gguf.GGUFWriter, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, list(value))


def _finish(writer: gguf.GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
