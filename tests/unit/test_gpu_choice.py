"""Which device is chosen, every refusal of a GPU with its cure, and what fits on a card: no card needed."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from scripts.gpu_figures import SHAPES
from tests.unit.test_resolve import LAPTOP, SMOL, reasons
from trireme.errors import ConfigError
from trireme.launch.commands.doctor import examine
from trireme.launch.commands.plan import make_plan
from trireme.machine.device import DeviceFacts, GpuFacts, gpu_from_text
from trireme.machine.gpu_support import lacks_on_gpu
from trireme.model.bodies import GptBody, MoeBody
from trireme.model.reader import arch_from_config
from trireme.model.spec import RopeSpec
from trireme.resolve import ModelFacts, resolve
from trireme.settings import load
from trireme.sizes import GIB

LONG = RopeSpec(kind="dynamic", dim=SMOL.rope.dim, original_max_position=512)
BOX = DeviceFacts(cores=16, memory_free=100 * GIB, memory_total=128 * GIB, num_gpus=1, has_cuda_kernels=True)


def resolved(arch=SMOL, device=BOX, **flags):
    return resolve(load(flags, environ={}).config, ModelFacts(arch, "m", 98 << 20), device)


@pytest.mark.parametrize("flags", [{"tp": 2}, {"pp": 2}, {"dp": 2}, {"tp": 2, "share_gpus": True}], ids=str)
def test_a_model_is_spread_over_gpus_where_there_are_enough(flags):
    box = msgspec.structs.replace(BOX, num_gpus=1 if "share_gpus" in flags else 2)
    assert resolved(device=box, **flags)[0].parallel.worker_kind == "cuda"


def changed(**fields):
    return msgspec.structs.replace(SMOL, **fields)


def test_a_gpu_is_chosen_where_there_is_one_that_can():
    config, decisions = resolved()
    assert config.parallel.device == "cuda"
    assert config.parallel.worker_kind == "cuda"
    assert (config.model.dtype, config.cache.kv_dtype) == ("bfloat16", "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_tokens) == (256, 16384)
    assert config.cache.kv_memory is None  # the worker measures what is left
    assert {"device", "dtype", "kv-dtype"} <= set(reasons(decisions))
    again, _ = resolve(config, ModelFacts(SMOL, "m", 98 << 20), BOX)
    assert again == config


@pytest.mark.parametrize(
    ("stored", "computed"), [("float16", "float16"), ("bfloat16", "bfloat16"), ("float32", "bfloat16")]
)
def test_everything_on_a_gpu_has_16_bits(stored, computed):
    config, _ = resolved(changed(weights_dtype=stored, source="safetensors"))
    assert (config.model.dtype, config.cache.kv_dtype) == (computed, computed)


def test_the_cpu_is_chosen_with_the_reason_against_the_gpu():
    for device, why in ((LAPTOP, "no NVIDIA GPU"), (msgspec.structs.replace(BOX, has_cuda_kernels=False), "not built")):
        config, decisions = resolved(device=device)
        assert config.parallel.worker_kind == "torch"
        assert why in reasons(decisions)["device"][1]
        assert (config.scheduler.max_num_seqs, config.scheduler.max_num_tokens) == (64, 256)
    assert resolved(tp=2)[0].parallel.device == "cpu"
    asked = load({"device": "cpu"}, environ={}).config
    assert resolve(asked, ModelFacts(SMOL, "m", 1), BOX)[0].parallel.worker_kind == "torch"


def mixture(**fields):
    body = {"num_experts": 32, "top_k": 4, "moe_layers": tuple(range(SMOL.num_layers)), "router": "softmax", **fields}
    return changed(body=MoeBody(**body), family="gpt_oss", weights_dtype="bfloat16", source="safetensors")


def test_a_mixture_of_experts_goes_to_the_gpu():
    for flags in ({}, {"tp": 2, "share_gpus": True}):
        config, _ = resolved(mixture(), **flags)
        assert config.parallel.worker_kind == "cuda"


@pytest.mark.parametrize(
    ("arch", "box", "flags", "why", "cure"),
    [
        (SMOL, {"num_gpus": 0}, {}, "no NVIDIA GPU", "--device cpu"),
        (SMOL, {"has_cuda_kernels": False}, {}, "trireme.models._cuda is not built", "make native"),
        (SMOL, {}, {"dp": 2}, "2 workers need a GPU each; there are 1", "--share-gpus"),
        (SMOL, {"num_gpus": 3}, {"tp": 2, "pp": 2}, "4 workers need a GPU each; there are 3", "fewer of --dp"),
        (SMOL, {}, {"quantize": "q8_0"}, "--quantize q8_0", "--quantize fp8"),
        (SMOL, {}, {"dtype": "float32"}, "16 bits", "--dtype bfloat16"),
        (SMOL, {}, {"kv_dtype": "int8"}, "does not hold int8", "--kv-dtype auto"),
        (SMOL, {}, {"dtype": "float16", "kv_dtype": "bfloat16"}, "float16, not bfloat16", "--kv-dtype auto"),
        (changed(rope=LONG), {}, {}, "a rotary base that grows with the length", "--max-len 512"),
        (changed(rope=LONG), {}, {"max_len": 513}, "a rotary base that grows with the length", "--max-len 512"),
        (
            changed(rope=LONG, head_dim=260),
            {},
            {},
            "a rotary base that grows with the length, heads of 260",
            "--device cpu",
        ),
        (mixture(), {}, {"quantize": "fp8"}, "experts on a GPU have 16 bits", "leave --quantize out"),
        (
            mixture(),
            {"num_gpus": 2},
            {"dp": 2, "ep": True},
            "--ep splits experts over engines on the CPU alone",
            "--tp",
        ),
        (mixture(num_experts=300), {}, {}, "lacks 300 experts", "--device cpu"),
    ],
)
def test_a_gpu_that_was_asked_for_is_refused_with_the_cure(arch, box, flags, why, cure):
    config = load({"device": "cuda", **flags}, environ={}).config
    with pytest.raises(ConfigError, match="--device cuda") as caught:
        resolve(config, ModelFacts(arch, "m", 1), msgspec.structs.replace(BOX, **box))
    assert why in caught.value.message
    assert cure in caught.value.hint


def test_what_the_gpu_body_lacks_is_named():
    assert lacks_on_gpu(SMOL) == []
    assert lacks_on_gpu(changed(norm_kind="layer", norm_bias=True, norm_placement="parallel")) == []
    assert lacks_on_gpu(changed(body=GptBody(learned_positions=2048))) == []
    assert lacks_on_gpu(changed(qk_norm=True, qk_norm_kind="wide", head_dim=260)) == ["heads of 260"]
    assert lacks_on_gpu(changed(rope=LONG), 512) == []
    assert lacks_on_gpu(mixture()) == []
    assert lacks_on_gpu(mixture(router="sigmoid", shared_expert=True, moe_layers=(0,))) == [
        "experts whose inputs are scaled",
        "experts that all tokens share",
        "layers without experts",
    ]
    assert lacks_on_gpu(msgspec.structs.replace(mixture(), ffn=1500)) == ["experts of 1500 columns"]


def llama_8b():
    shape = {"num_layers": 32, "hidden": 4096, "num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "ffn": 14336}
    return changed(**shape, vocab_size=128256, max_position=131072, weights_dtype="bfloat16", tie_embeddings=False)


def plan_for(card, box=BOX, **flags):
    facts = ModelFacts(llama_8b(), "8b", 16 * GIB)
    return make_plan(load(flags, environ={}).config, facts, box, card)


def test_a_plan_for_a_gpu_counts_the_cards_memory():
    plan = plan_for(GpuFacts("H100", 79 * GIB, 80 * GIB))
    assert not plan.refusal
    assert [share.what for share in plan.shares] == ["weights", "KV cache", "activations", "graphs"]
    assert plan.shares[0].total == pytest.approx(16.06e9, rel=0.01)
    assert plan.largest_len == 131072
    # what was left for KV when such a card was measured: 53.7 GiB
    assert plan.shares[1].total == pytest.approx(53.7 * GIB, rel=0.03)


@pytest.mark.parametrize("flags", [{"tp": 2}, {"pp": 2}], ids=str)
def test_a_plan_for_two_gpus_is_that_of_one_of_them_with_its_share(flags):
    card = GpuFacts("H100", 79 * GIB, 80 * GIB)
    plan = plan_for(card, msgspec.structs.replace(BOX, num_gpus=2), **flags)
    alone = plan_for(card)
    assert not plan.refusal
    assert plan.shares[0].total == pytest.approx(alone.shares[0].total / 2, rel=0.001)
    # half the weights and half the bytes of a token
    assert plan.contexts[-1].at_once > 2 * alone.contexts[-1].at_once


def test_a_plan_for_a_small_gpu_names_the_length_that_fits():
    card = GpuFacts("L4", 23 * GIB, 24 * GIB)
    plan = plan_for(card)
    assert "131072 tokens needs 16 GiB of KV cache" in plan.refusal
    (cure,) = plan.cures
    flag, value, *_ = cure.split()
    assert flag == "--max-len"
    assert not plan_for(card, max_len=int(value)).refusal


def test_a_plan_without_a_word_from_the_card_is_refused():
    with pytest.raises(ConfigError, match="nvidia-smi"):
        plan_for(None)


def test_the_drivers_table_is_read():
    text = "NVIDIA H100 80GB HBM3, 80994, 81559\nNVIDIA H100 80GB HBM3, 1, 2\n"
    assert gpu_from_text(text) == GpuFacts("NVIDIA H100 80GB HBM3", 80994 << 20, 81559 << 20)
    assert gpu_from_text("No devices were found") is None
    assert gpu_from_text("") is None
    assert gpu_from_text("NVIDIA GB10, [N/A], [N/A]") is None


def test_the_doctor_sees_a_card_without_kernels():
    found = {finding.what: finding for finding in examine(msgspec.structs.replace(BOX, has_cuda_kernels=False))}
    assert (found["GPUs"].state, "make native" in found["GPUs"].cure) == ("warn", True)


def test_sizes_of_graphs_are_checked_before_anything_starts():
    for asked in ("auto", "none", "1,8,32"):
        assert resolved(graph_sizes=asked)[0].parallel.graph_sizes == asked
    with pytest.raises(
        ConfigError, match="--graph-sizes 300: not auto, none or numbers of sequences in a step, 1 to 256"
    ):
        resolved(graph_sizes="1,300")
    assert resolved(graph_sizes="1,300", max_num_seqs=300)[0].parallel.graph_sizes == "1,300"
    with pytest.raises(ConfigError, match="--graph-sizes none is for a GPU") as caught:
        resolved(device=LAPTOP, graph_sizes="none")
    assert caught.value.hint == "leave --graph-sizes out"


@pytest.mark.parametrize(("flags", "target"), [({}, "~11.8ms"), ({"quantize": "fp8"}, "~10ms"), ({"tp": 2}, "~10ms")])
def test_the_default_target_is_that_of_the_loaded_weights(flags, target):
    """Dummy weights have no files, and those that are quantized at the load have larger ones: 16 GB in 16 bits for 8B."""
    shape = SHAPES["llama-8b"]
    arch = arch_from_config(shape, {}, Path("llama-8b"))
    box = msgspec.structs.replace(BOX, num_gpus=2)
    config = load({"load_format": "dummy", **flags}, environ={}).config
    assert resolve(config, ModelFacts(arch, "m", 0), box)[0].scheduler.itl_target == target
