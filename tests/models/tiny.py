"""Writes small models to disk for tests: random tiny decoders, the stub models of the cases, and the T-byte tokenizer.

Everybody's tests call these builders with a tmp_path; they are fast (no transformers import) and need no network.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOS, EOS, PAD = 256, 257, 258
NUM_BASE_TOKENS = 259

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)

# Differences of the families, as config.json keys.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "rms_norm_eps": 1e-5},
    "mistral": {"architectures": ["MistralForCausalLM"], "rms_norm_eps": 1e-5, "sliding_window": None},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "rms_norm_eps": 1e-6},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "rms_norm_eps": 1e-6},
}


def byte_chars() -> list[str]:
    """The printable character that stands for each byte in byte-level BPE vocabularies (GPT-2's table)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {byte: chr(byte) for byte in printable}
    spare = iter(range(256, 512))
    return [table.get(byte) or chr(next(spare)) for byte in range(256)]


def byte_vocab(extra: Sequence[str] = (), size: int = 0) -> dict[str, int]:
    """T-byte vocabulary: 0-255 bytes, BOS, EOS, PAD, whole-string tokens, then fillers up to `size`."""
    chars = byte_chars()
    vocab = {char: byte for byte, char in enumerate(chars)}
    vocab |= {"<s>": BOS, "</s>": EOS, "<pad>": PAD}
    for text in extra:
        piece = "".join(chars[byte] for byte in text.encode())
        if piece in vocab:
            raise ValueError(f"token {text!r} is in the vocabulary already")
        vocab[piece] = len(vocab)
    while len(vocab) < size:
        vocab[f"<t{len(vocab)}>"] = len(vocab)
    return vocab


def _special(token_id: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": token_id, "content": content, **flags, "special": True}


def write_byte_tokenizer(
    directory: Path, *, extra: Sequence[str] = (), size: int = 0, chat_template: str | None = CHAT_TEMPLATE
) -> None:
    """Writes T-byte: text always becomes one token per byte (no BOS); `extra` tokens are emitted, never encoded."""
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": False, "use_regex": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [_special(BOS, "<s>"), _special(EOS, "</s>"), _special(PAD, "<pad>")],
        "normalizer": None,
        "pre_tokenizer": byte_level,
        "post_processor": None,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": byte_vocab(extra, size),
            "merges": [],
        },
    }
    config = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "add_bos_token": False}
    if chat_template is not None:
        config["chat_template"] = chat_template
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_config(family: str = "llama", **changes: Any) -> dict[str, Any]:
    """config.json of M-tiny (2 layers, hidden 64, 4 heads, 2 KV heads, vocab 320); keys are Hugging Face's."""
    config: dict[str, Any] = {
        "model_type": family,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 320,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    config |= FAMILIES[family]
    config |= changes
    if "head_dim" not in config:
        config["head_dim"] = config["hidden_size"] // config["num_attention_heads"]
    return config


def weight_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes of the tensors of a Hugging Face checkpoint with this config."""
    hidden, ffn, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    q_dim = config["num_attention_heads"] * config["head_dim"]
    kv_dim = config["num_key_value_heads"] * config["head_dim"]
    family = config["model_type"]
    qkv_bias = family == "qwen2" or config.get("attention_bias", False)
    o_bias = family != "qwen2" and config.get("attention_bias", False)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm.weight": (hidden,), at + "post_attention_layernorm.weight": (hidden,)}
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q_dim, hidden, qkv_bias),
            ("self_attn.k_proj", kv_dim, hidden, qkv_bias),
            ("self_attn.v_proj", kv_dim, hidden, qkv_bias),
            ("self_attn.o_proj", hidden, q_dim, o_bias),
            ("mlp.gate_proj", ffn, hidden, config.get("mlp_bias", False)),
            ("mlp.up_proj", ffn, hidden, config.get("mlp_bias", False)),
            ("mlp.down_proj", hidden, ffn, config.get("mlp_bias", False)),
        ):
            shapes[f"{at}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{at}{name}.bias"] = (rows,)
        if family == "qwen3":
            shapes |= {at + f"self_attn.{side}_norm.weight": (config["head_dim"],) for side in ("q", "k")}
    return shapes


def random_weights(config: dict[str, Any], seed: int = 0) -> dict[str, Any]:
    """Random tensors (torch, fp32) of a size that makes attention and logits lively: no two tokens come out alike."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in weight_shapes(config).items():
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            weights[name] = 1.0 + 0.2 * noise
        elif name.endswith(".bias"):
            weights[name] = 0.3 * noise
        elif name.startswith(("model.embed", "lm_head")):
            weights[name] = noise
        else:
            weights[name] = noise * (1.6 / shape[-1] ** 0.5)
    return weights


def make_tiny(
    directory: Path,
    family: str = "llama",
    *,
    seed: int = 0,
    dtype: str = "float32",
    shards: int = 1,
    tokenizer: bool = True,
    **changes: Any,
) -> Path:
    """Writes a random tiny model as config.json + safetensors (+ T-byte tokenizer); returns the directory.

    `dtype` is the stored type; `shards` > 1 writes an index; `changes` are config.json keys (hidden_size=..., rope_scaling=...).
    """
    import torch
    from safetensors.torch import save_file

    directory.mkdir(parents=True, exist_ok=True)
    config = tiny_config(family, torch_dtype=dtype, **changes)
    (directory / "config.json").write_text(json.dumps(config))
    stored = getattr(torch, dtype)
    weights = {name: tensor.to(stored) for name, tensor in random_weights(config, seed).items()}
    if shards == 1:
        save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    else:
        names = sorted(weights)
        weight_map = {}
        for shard in range(shards):
            file_name = f"model-{shard + 1:05d}-of-{shards:05d}.safetensors"
            part = {name: weights[name] for name in names[shard::shards]}
            save_file(part, directory / file_name, metadata={"format": "pt"})
            weight_map |= dict.fromkeys(part, file_name)
        index = {"metadata": {"total_size": sum(t.nbytes for t in weights.values())}, "weight_map": weight_map}
        (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    if tokenizer:
        write_byte_tokenizer(directory, size=config["vocab_size"])
    return directory


def make_tiny_llama(directory: Path, **options: Any) -> Path:
    """M-tiny: see make_tiny."""
    return make_tiny(directory, "llama", **options)


def make_stub(
    directory: Path,
    kind: str = "script",
    *,
    extra: Sequence[str] = (),
    scripts: Sequence[Sequence[int | str]] = (),
    logits: dict[int, float] | None = None,
    default: float = -10.0,
    max_position: int = 4096,
    delay_ms: float = 0.0,
    vocab_size: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Writes a stub model (family "stub") with the T-byte tokenizer plus the whole-string tokens `extra`.

    kind "script": choice c emits scripts[c % len(scripts)], then EOS for ever; a string entry means that extra token
    (or, if it is no extra token, its bytes). kind "const": every position's logits are `logits`, `default` elsewhere.
    config.json: {"model_type": "trireme_stub", "vocab_size", "max_position_embeddings", bos/eos/pad_token_id,
    "stub": {"kind", "scripts" | "logits" (id as string -> value) + "default", "delay_ms"}}.
    """
    directory.mkdir(parents=True, exist_ok=True)
    ids_of_extra = {text: NUM_BASE_TOKENS + i for i, text in enumerate(extra)}
    stub: dict[str, Any] = {"kind": kind, "delay_ms": delay_ms}
    if kind == "script":
        stub["scripts"] = [_script_ids(script, ids_of_extra) for script in scripts or [[EOS]]]
    else:
        stub["logits"] = {str(token): value for token, value in (logits or {}).items()}
        stub["default"] = default
    size = max(vocab_size, NUM_BASE_TOKENS + len(extra))
    config = {
        "model_type": "trireme_stub",
        "vocab_size": size,
        "max_position_embeddings": max_position,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
        "stub": stub,
    }
    (directory / "config.json").write_text(json.dumps(config))
    write_byte_tokenizer(directory, extra=extra, size=size, chat_template=chat_template)
    return directory


def _script_ids(script: Sequence[int | str], ids_of_extra: dict[str, int]) -> list[int]:
    ids: list[int] = []
    for entry in script:
        if isinstance(entry, int):
            ids.append(entry)
        elif entry in ids_of_extra:
            ids.append(ids_of_extra[entry])
        else:
            ids.extend(entry.encode())
    return ids


# ---------------------------------------------------------------- T-spm

SPM_SPECIAL = "<|x|>"
SPM_WORDS = ("\u2581", "\u2581\u2581", "\u2581hi", "hi", "\u2581a", "h", "i", "a")
# pieces that can be merged, best first: the two orders put the double space before and after " hi"
SPM_ORDERS = {
    "space-first": ("\u2581\u2581", "hi", "\u2581hi", "\u2581a"),
    "word-first": ("hi", "\u2581hi", "\u2581a", "\u2581\u2581"),
}
_SPM_PARTS = {
    "\u2581\u2581": ("\u2581", "\u2581"),
    "hi": ("h", "i"),
    "\u2581hi": ("\u2581", "hi"),
    "\u2581a": ("\u2581", "a"),
}


def spm_pieces() -> list[str]:
    """T-spm in id order: unknown, BOS, EOS, the 256 bytes, the words, one user-defined token."""
    return ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *SPM_WORDS, SPM_SPECIAL]


def spm_scores(order: str) -> list[float]:
    """Scores as SentencePiece gives them: 0 for control and bytes, minus the rank for what merges, the worst for letters."""
    ranks = {piece: -float(rank) for rank, piece in enumerate(SPM_ORDERS[order])}
    return [ranks.get(piece, -100.0 if piece in SPM_WORDS else 0.0) for piece in spm_pieces()]


def write_spm_tokenizer(directory: Path, order: str = "word-first", *, add_bos: bool = True) -> None:
    """T-spm as tokenizer.json, in the form that Llama 2's has."""
    directory.mkdir(parents=True, exist_ok=True)
    pieces = spm_pieces()
    ids = {piece: token for token, piece in enumerate(pieces)}
    user = {**_special(ids[SPM_SPECIAL], SPM_SPECIAL), "special": False}
    begin = [{"SpecialToken": {"id": "<s>", "type_id": 0}}] if add_bos else []
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [*(_special(i, pieces[i]) for i in range(3)), user],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [
                {"type": "Prepend", "prepend": "\u2581"},
                {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            ],
        },
        "pre_tokenizer": None,
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [*begin, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [*begin, {"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {
            "type": "Sequence",
            "decoders": [
                {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "},
                {"type": "ByteFallback"},
                {"type": "Fuse"},
                {"type": "Strip", "content": " ", "start": 1, "stop": 0},
            ],
        },
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": ids,
            "merges": [list(_SPM_PARTS[piece]) for piece in SPM_ORDERS[order]],
        },
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
