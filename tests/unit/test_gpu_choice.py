"""Which device is chosen, every refusal of a GPU with its cure, and what fits on a card: no card needed."""

from __future__ import annotations

import msgspec
import pytest

from tests.unit.test_resolve import LAPTOP, SMOL, reasons
from trireme.device import DeviceFacts
from trireme.errors import ConfigError
from trireme.gpu import lacks_on_gpu
from trireme.resolve import ModelFacts, resolve
from trireme.settings import load
from trireme.sizes import GIB

BOX = DeviceFacts(cores=16, memory_free=100 * GIB, memory_total=128 * GIB, num_gpus=1, has_cuda_kernels=True)


def resolved(arch=SMOL, device=BOX, **flags):
    return resolve(load(flags, environ={}).config, ModelFacts(arch, "m", 98 << 20), device)


def changed(**fields):
    return msgspec.structs.replace(SMOL, **fields)


def test_a_gpu_is_chosen_where_there_is_one_that_can():
    config, decisions = resolved()
    assert config.parallel.device == "cuda"
    assert config.parallel.worker_kind == "cuda"
    assert (config.model.dtype, config.cache.kv_dtype) == ("bfloat16", "bfloat16")
    assert (config.scheduler.max_num_seqs, config.scheduler.max_num_tokens) == (256, 8192)
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


@pytest.mark.parametrize(
    ("arch", "box", "flags", "why", "cure"),
    [
        (SMOL, {"num_gpus": 0}, {}, "no NVIDIA GPU", "--device cpu"),
        (SMOL, {"has_cuda_kernels": False}, {}, "models._cuda is not built", "make native"),
        (SMOL, {}, {"dp": 2}, "2 engines need a GPU each; there are 1", "--dp 1"),
        (SMOL, {}, {"tp": 2}, "tp is 2", "--tp 1 --pp 1"),
        (SMOL, {}, {"quantize": "q8_0"}, "--quantize q8_0", "without --quantize"),
        (SMOL, {}, {"dtype": "float32"}, "16 bits", "--dtype bfloat16"),
        (SMOL, {}, {"kv_dtype": "int8"}, "does not hold int8", "--kv-dtype auto"),
        (SMOL, {}, {"dtype": "float16", "kv_dtype": "bfloat16"}, "float16, not bfloat16", "--kv-dtype auto"),
        (changed(attn_softcap=50.0), {}, {}, "scores with a soft cap", "--device cpu"),
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
    assert lacks_on_gpu(changed(norm_kind="layer", head_dim=260)) == ["norms other than RMS", "heads of 260"]
    assert lacks_on_gpu(changed(norm_placement="parallel")) == ["parallel norms"]
