"""Formats of weights on a GPU: which one a matrix gets, what it says of blocks, refusals on a CPU, and what a plan counts."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.unit.test_gpu_choice import BOX, changed, llama_8b, resolved
from tests.unit.test_resolve import LAPTOP, SMOL, reasons
from trireme.config import ModelConfig
from trireme.errors import ConfigError
from trireme.launch.commands.plan import make_plan
from trireme.machine.device import GpuFacts
from trireme.machine.gpu_formats import check_gpu, format_of, gpu_weight_bytes, stored_in
from trireme.model.gguf_header import GgufTensor
from trireme.resolve import ModelFacts, resolve
from trireme.settings import load
from trireme.sizes import GIB

CARD = GpuFacts("H100", 79 * GIB, 80 * GIB)


@pytest.mark.parametrize(
    ("kind", "k", "scheme", "expected"),
    [
        ("BF16", 4096, None, "half"),
        ("BF16", 4096, "fp8", "fp8"),
        ("BF16", 4096, "q4_k", "q4_k"),
        ("BF16", 320, "q4_k", "half"),  # rows that are no whole super-blocks
        ("BF16", 72, "fp8", "half"),
        ("Q4_K", 4096, None, "q4_k"),
        ("Q4_K", 4096, "fp8", "q4_k"),  # never rounded twice
        ("Q6_K", 4096, None, "q6_k"),
        ("Q8_0", 4096, "fp8", "q8_0"),
        ("IQ4_NL", 4096, None, "iq4_nl"),
        ("Q8_0", 576, None, "half"),  # rows that are not laid out in super-blocks
        ("Q3_K", 4096, None, "half"),
        ("Q3_K", 4096, "fp8", "fp8"),
        ("FP8", 4096, None, "fp8"),
        ("FP8", 72, None, "half"),
        ("FP8_BLOCKS", 4096, None, "fp8_blocks"),
        ("FP8_BLOCKS", 192, None, "half"),
        ("W4_128", 4096, None, "w4_128"),
        ("W4_64", 4096, "fp8", "w4_64"),  # never rounded twice
        ("W4_32", 96, None, "half"),
        ("W4_32", 192, "fp8", "fp8"),
        ("BF16", 4096, "int8", "int8"),
        ("BF16", 72, "int8", "half"),
        ("Q3_K", 4096, "int8", "int8"),
        ("INT8", 4096, None, "int8"),
        ("INT8", 80, "fp8", "int8"),  # never rounded twice
        ("INT8", 72, None, "half"),
    ],
)
def test_a_matrix_keeps_its_blocks_where_a_kernel_knows_them(kind: str, k: int, scheme: Any, expected: str) -> None:
    assert format_of(kind, k, scheme) == expected


def tensors(**kinds: str) -> dict[str, GgufTensor]:
    names = {name.replace("__", "."): kind for name, kind in kinds.items()}
    return {name: GgufTensor(name, kind, (256, 64), 0, 0) for name, kind in names.items()}


def test_blocks_that_no_kernel_knows_are_told_of() -> None:
    stored = stored_in(tensors(token_embd__weight="Q8_0", blk__0__a__weight="Q4_K", blk__0__b__weight="Q3_K"))
    arch = changed(source="gguf", weights_dtype="gguf", hidden=512)
    facts = ModelFacts(arch, "m", 98 << 20, stored=stored)
    for flags, becomes in (({}, "16 bits"), ({"quantize": "fp8"}, "fp8")):
        _, decisions = resolve(load(flags, environ={}).config, facts, BOX)
        assert reasons(decisions)["weights"][0] == f"1 Q3_K as {becomes}"
    assert "weights" not in reasons(resolve(load({}, environ={}).config, facts, LAPTOP)[1])


def test_weights_of_a_file_are_counted_by_type() -> None:
    arch = changed(source="gguf", vocab_size=64, hidden=256)
    found = tensors(
        token_embd__weight="Q8_0", blk__0__a__weight="Q6_K", blk__0__b__weight="Q3_K", output__weight="Q4_K"
    )
    size = 256 * 64
    assert gpu_weight_bytes(ModelConfig(), arch, stored_in(found)) == size * 2 + size * (144 + 224) / 256 + size * 2
    assert (
        gpu_weight_bytes(ModelConfig(quantize="fp8"), arch, stored_in(found))
        == size * 2 + size * (144 + 224) / 256 + size
    )


@pytest.mark.parametrize(
    ("flags", "bytes_of_8b"),
    [({}, 16.06e9), ({"quantize": "fp8"}, 9.08e9), ({"quantize": "int8"}, 9.08e9), ({"quantize": "q4_k"}, 6.03e9)],
)
def test_a_plan_counts_rounded_weights(flags: dict[str, str], bytes_of_8b: float) -> None:
    plan = make_plan(load(flags, environ={}).config, ModelFacts(llama_8b(), "8b", 16 * GIB), BOX, CARD)
    assert plan.shares[0].total == pytest.approx(bytes_of_8b, rel=0.005)


def test_a_plan_counts_int8_checkpoints() -> None:
    """By what lies on the card, not by the size of the files."""
    arch = msgspec.structs.replace(llama_8b(), weights_kind="INT8")
    plan = make_plan(load({}, environ={}).config, ModelFacts(arch, "8b", 1), BOX, CARD)
    assert plan.config.parallel.device == "cuda"
    assert plan.shares[0].total == pytest.approx(9.08e9, rel=0.005)


def test_int8_is_for_both() -> None:
    assert resolved(quantize="int8")[0].parallel.device == "cuda"
    config, _ = resolved(device=LAPTOP, quantize="int8")
    assert (config.parallel.device, config.model.quantize) == ("cpu", "int8")


def test_a_cache_of_fp8_holds_twice_as_much() -> None:
    facts = ModelFacts(llama_8b(), "8b", 16 * GIB)
    wide, narrow = (make_plan(load(flags, environ={}).config, facts, BOX, CARD) for flags in ({}, {"kv_dtype": "fp8"}))
    assert narrow.contexts[0].kv_bytes * 2 == wide.contexts[0].kv_bytes
    assert narrow.config.cache.kv_dtype == "fp8"
    assert narrow.config.model.dtype == "bfloat16"


def test_a_plan_that_does_not_fit_names_what_halves_it() -> None:
    plan = make_plan(load({"kv_memory": "70GiB"}, environ={}).config, ModelFacts(llama_8b(), "8b", 1), BOX, CARD)
    assert any("--kv-dtype fp8" in cure for cure in plan.cures)
    assert any("--quantize fp8" in cure for cure in plan.cures)


@pytest.mark.parametrize(
    ("flags", "what", "cure"),
    [
        ({"quantize": "fp8"}, "--quantize fp8", "--quantize q8_0"),
        ({"quantize": "q4_k"}, "--quantize q4_k", "--quantize q8_0"),
        ({"kv_dtype": "fp8"}, "--kv-dtype fp8", "--kv-dtype int8"),
    ],
)
def test_a_cpu_refuses_what_only_a_gpu_has(flags: dict[str, str], what: str, cure: str) -> None:
    with pytest.raises(ConfigError, match=f"{what} is for a GPU") as caught:
        resolved(device=LAPTOP, **flags)
    assert caught.value.hint == cure


def test_a_cache_of_fp8_needs_heads_that_its_kernel_has() -> None:
    with pytest.raises(ConfigError, match="heads of 80 have no cache of fp8"):
        resolve(
            load({"device": "cuda", "kv_dtype": "fp8"}, environ={}).config,
            ModelFacts(changed(head_dim=80), "m", 1),
            BOX,
        )
    assert resolved(SMOL, kv_dtype="fp8")[0].cache.kv_dtype == "fp8"


def test_a_card_without_float8_products_is_told() -> None:
    check_gpu({"half": 5, "q4_k": 5}, (8, 0), "A100")
    check_gpu({"fp8": 5}, (8, 9), "L4")
    with pytest.raises(ConfigError, match="fp8 weights need a GPU of compute capability 8.9; A100 has 8.0") as caught:
        check_gpu({"fp8": 5}, (8, 0), "A100")
    assert "--quantize int8 or q4_k" in caught.value.hint
