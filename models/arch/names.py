"""Hugging Face weight names that several bodies share: norms by placement, feed-forward networks, routers.

Backend-neutral; read by models/cpu and models/cuda. Pure, no torch.
"""

from __future__ import annotations

from typing import NamedTuple

from trireme.model.bodies import MoeBody
from trireme.model.spec import NormPlacement


class NormNames(NamedTuple):
    """Norms of a layer: before and after attention, before and after the feed-forward network; "" for none."""

    attn_norm: str = ""
    attn_post: str = ""
    ffn_norm: str = ""
    ffn_post: str = ""


NORM_NAMES: dict[NormPlacement, NormNames] = {
    "pre": NormNames("input_layernorm", "", "post_attention_layernorm", ""),
    "post": NormNames("", "post_attention_layernorm", "", "post_feedforward_layernorm"),
    "both": NormNames(
        "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm"
    ),
    "parallel": NormNames("input_layernorm"),
}


FEED_FORWARD = {"llama4": "feed_forward", "gpt_oss": "mlp", "mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}


def router_name(body: MoeBody) -> str:
    """Checkpoint name of a layer's router."""
    return "gate" if body.expert_names else "router"
