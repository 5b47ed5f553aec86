"""Reads the metadata of a GGUF file of the decoder families. Called by trireme.model.reader; other readers use parts of it."""

from __future__ import annotations

from collections.abc import Callable
from math import isclose
from typing import Any, NamedTuple

import msgspec

from trireme.errors import ModelError
from trireme.model.gguf_header import GgufFile, Scalar
from trireme.model.hf_config import rope_kind
from trireme.model.spec import MAX_DIM, ArchSpec, RopeSpec, checked, yarn_scale


def arch_from_gguf(file: GgufFile) -> ArchSpec:
    """ArchSpec of a GGUF file from its metadata, and from which tensors it has (biases, norms, output matrix)."""
    family = file.text("general.architecture")
    row = GGUF_FAMILIES[family]
    if file.whole("split.count", 1) > 1:
        raise ModelError(f"{file.path} is one part of several", hint="llama-gguf-split --merge makes one file of them")
    if file.whole(f"{family}.expert_count", 0) > 0:
        raise ModelError(f"{file.path} is an MoE model (mixture of experts), which is not supported yet")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelError(f"{file.path} has no matrix token_embd.weight")
    hidden = read_dim(file, f"{family}.embedding_length")
    heads = read_dim(file, f"{family}.attention.head_count")
    head_dim = read_dim(file, f"{family}.attention.key_length", hidden // heads)
    if file.whole(f"{family}.attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{file.path} has values of another size than its keys, which is not supported")
    arch = ArchSpec(
        family=row.family or family,
        num_layers=read_dim(file, f"{family}.block_count"),
        hidden=hidden,
        num_heads=heads,
        num_kv_heads=read_dim(file, f"{family}.attention.head_count_kv", heads),
        head_dim=head_dim,
        ffn=read_dim(file, f"{family}.feed_forward_length"),
        vocab_size=embedding.num_rows,
        norm_eps=file.real(f"{family}.attention.layer_norm{'' if row.layer_norm else '_rms'}_epsilon"),
        rope=rope_from_gguf(file, family, head_dim),
        max_position=read_dim(file, f"{family}.context_length"),
        tie_embeddings="output.weight" not in file.tensors,
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        o_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_up.bias" in file.tensors,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        sliding_window=file.whole(f"{family}.attention.sliding_window", 0) or None,
        bos_token_id=read_token(file, "bos"),
        eos_token_ids=tuple(
            dict.fromkeys(t for t in (read_token(file, k) for k in ("eos", "eot", "eom")) if t is not None)
        ),
        pad_token_id=read_token(file, "padding"),
        weights_dtype="gguf",
        source="gguf",
    )
    arch = msgspec.structs.replace(arch, **row.traits(file, arch))
    _check_unread(file, family, arch)
    return checked(arch, file.path)


# Keys <family>.* that change what a model computes: their neutral values, and the families that read them.
_ALTERING: dict[str, tuple[tuple[Scalar, ...], tuple[str, ...]]] = {
    "attention.clamp_kqv": ((0,), ()),
    "attention.max_alibi_bias": ((0,), ()),
    "attention.causal": ((True,), ()),
    "attention.scale": ((0,), ("granite",)),
    "attention.temperature_scale": ((0,), ()),
    "attention.sliding_window_pattern": ((0, 1), ("gemma3",)),
    "attn_logit_softcapping": ((0,), ("gemma2",)),
    "final_logit_softcapping": ((0,), ("gemma2", "gemma3")),
    "logit_scale": ((0, 1), ("granite", "command-r")),
    "residual_scale": ((0, 1), ("granite",)),
    "embedding_scale": ((0, 1), ("granite",)),
    "nextn_predict_layers": ((0,), ()),
    "rope.freq_base_swa": ((), ("gemma3",)),
    "rope.scaling.yarn_log_multiplier": ((0,), ()),
    "rope.scaling.yarn_attn_factor": ((1,), ()),
}


def _check_unread(file: GgufFile, family: str, arch: ArchSpec) -> None:
    """Raises ModelError for a key that would change the result and that nothing reads for this family."""
    for key, (neutral, readers) in _ALTERING.items():
        value = file.metadata.get(f"{family}.{key}")
        derived = (
            key == "attention.scale" and isinstance(value, float) and isclose(value, _scale_of(arch), rel_tol=1e-5)
        )
        if value is not None and value not in neutral and family not in readers and not derived:
            raise ModelError(f"{file.path}: {family}.{key} is {value}, which is not supported for {family}")


def _scale_of(arch: ArchSpec) -> float:
    return arch.attn_scale or arch.head_dim**-0.5


def rope_from_gguf(file: GgufFile, family: str, head_dim: int) -> RopeSpec:
    """RopeSpec from the keys <family>.rope.*; the Llama 3 rule is not among them but in the tensor rope_freqs.weight, which the
    loader applies."""
    at = f"{family}.rope."
    kind = rope_kind(file.text(at + "scaling.type", "none"), file.path)
    factor = file.real(at + "scaling.factor", file.real(at + "scale_linear", 1.0)) or 1.0
    if at + "scaling.type" not in file.metadata and factor != 1.0:  # (older files name a factor alone)
        kind = "linear"
    if kind == "default":
        factor = 1.0
    attention = None
    if kind == "yarn" and at + "scaling.attn_factor" in file.metadata:
        attention = file.real(at + "scaling.attn_factor") * yarn_scale(factor)
    elif file.real(at + "scaling.attn_factor", 1.0) != 1.0 and "rope_factors_long.weight" not in file.tensors:
        raise ModelError(f"{file.path}: {at}scaling.attn_factor is supported with yarn and longrope, not with {kind}")
    if "rope_factors_long.weight" in file.tensors:  # (the loader reads them)
        kind = "longrope"
        attention = file.real(at + "scaling.attn_factor", 1.0)
    return RopeSpec(
        kind=kind,
        theta=file.real(at + "freq_base", 10000.0),
        dim=read_dim(file, at + "dimension_count", head_dim),
        factor=factor,
        original_max_position=file.whole(
            at + "scaling.original_context_length", file.whole(f"{family}.context_length")
        ),
        beta_fast=file.real(at + "scaling.yarn_beta_fast", 32.0),
        beta_slow=file.real(at + "scaling.yarn_beta_slow", 1.0),
        attention_factor=attention,
    )


def read_dim(file: GgufFile, key: str, default: int | None = None) -> int:
    value = file.whole(key, default)
    if not 1 <= value <= MAX_DIM:
        raise ModelError(f"{file.path}: {key} is {value}; it must be 1 to {MAX_DIM}")
    return value


def read_token(file: GgufFile, name: str) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    return file.whole(key) if key in file.metadata else None


# ---------------------------------------------------------------- differences between families


def _plain(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    return {}


def _scaled_by_width(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    return {"embed_scale": arch.hidden**0.5, "activation": "gelu_tanh"}


def _every(step: int, layers: int) -> tuple[int, ...]:
    return tuple(range(step - 1, layers, step))


def _gemma2(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    largest = arch.num_layers == 46  # only the 27B model scales scores by its hidden size
    return {
        **_scaled_by_width(file, arch),
        "norm_placement": "both",
        "attn_scale": (arch.hidden / arch.num_heads if largest else arch.head_dim) ** -0.5,
        "attn_softcap": file.real("gemma2.attn_logit_softcapping", 50.0),
        "logit_softcap": file.real("gemma2.final_logit_softcapping", 30.0),
        "full_attention_layers": _every(2, arch.num_layers),
    }


def _gemma3(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    largest = arch.num_layers == 62
    local = RopeSpec(theta=file.real("gemma3.rope.freq_base_swa", 10000.0), dim=arch.rope.dim)
    every = file.whole("gemma3.attention.sliding_window_pattern", 6)
    return {
        **_scaled_by_width(file, arch),
        "norm_placement": "both",
        "attn_scale": (arch.hidden / arch.num_heads if largest else arch.head_dim) ** -0.5,
        "logit_softcap": file.real("gemma3.final_logit_softcapping", 0.0),
        "full_attention_layers": _every(max(every, 1), arch.num_layers),
        "rope_local": local,
    }


def _olmo2(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    return {"norm_placement": "post", "qk_norm_kind": "wide"}


def _granite(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    return {
        "embed_scale": file.real("granite.embedding_scale", 1.0),
        "residual_scale": file.real("granite.residual_scale", 1.0),
        "attn_scale": file.real("granite.attention.scale", 0.0),
        "logit_scale": 1.0 / (file.real("granite.logit_scale", 1.0) or 1.0),
    }


def _smollm3(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    return {"no_rope_layers": _every(4, arch.num_layers)}


def _command_r(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    return {
        "norm_kind": "layer",
        "norm_placement": "parallel",
        "qk_norm_kind": "heads",
        "logit_scale": file.real("command-r.logit_scale", 0.0625),
    }


def _stablelm(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    parallel = "blk.0.ffn_norm.weight" not in file.tensors
    return {
        "norm_kind": "layer",
        "norm_bias": True,
        "norm_placement": "parallel" if parallel else "pre",
        "qk_norm_kind": "heads",
    }


def _baichuan(file: GgufFile, arch: ArchSpec) -> dict[str, Any]:
    if arch.hidden > 4096:
        raise ModelError(f"{file.path}: Baichuan of this size has ALiBi positions; only the 7B ones are supported")
    return {}


class GgufFamily(NamedTuple):
    """`family` is the entry of the family table when its name differs; `traits` gives the fields that no key names."""

    traits: Callable[[GgufFile, ArchSpec], dict[str, Any]] = _plain
    family: str = ""
    layer_norm: bool = False


# Family entries by general.architecture.
GGUF_FAMILIES: dict[str, GgufFamily] = {
    "llama": GgufFamily(),
    "qwen2": GgufFamily(),
    "qwen3": GgufFamily(),
    "gemma": GgufFamily(_scaled_by_width),
    "gemma2": GgufFamily(_gemma2),
    "gemma3": GgufFamily(_gemma3, family="gemma3_text"),
    "phi3": GgufFamily(),
    "olmo2": GgufFamily(_olmo2),
    "granite": GgufFamily(_granite),
    "smollm3": GgufFamily(_smollm3),
    "command-r": GgufFamily(_command_r, family="cohere", layer_norm=True),
    "stablelm": GgufFamily(_stablelm, layer_norm=True),
    "internlm2": GgufFamily(),
    "baichuan": GgufFamily(_baichuan),
}
