"""SmolLM2 as Hugging Face transformers compute it, its weights expanded by the gguf package; shares no code with our loader."""

from __future__ import annotations

from typing import Any

import gguf
import numpy as np
import torch

from trireme.model.files import find_model


def expanded_smollm2() -> Any:
    """In float32, on the CPU."""
    import transformers

    reader = gguf.GGUFReader(find_model("smollm2").path)
    config = transformers.LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_theta=100000.0,
        tie_word_embeddings=True,
    )
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    names = gguf.TensorNameMap(gguf.MODEL_ARCH.LLAMA, 30)
    of_gguf = {names.get_name(name, (".weight",)): name for name in model.state_dict()}
    weights = {}
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        heads = {"attn_q": 9, "attn_k": 3}.get(tensor.name.split(".")[-2])
        if heads:
            values = values.reshape(heads, -1, 2, 576).swapaxes(1, 2).reshape(-1, 576)
        weights[of_gguf[tensor.name]] = torch.from_numpy(np.array(values, dtype=np.float32))
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True)
    model.model.rotary_emb = type(model.model.rotary_emb)(config)
    return model.eval()
