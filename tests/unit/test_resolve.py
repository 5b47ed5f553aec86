"""Resolving: every "auto" gets a value and a reason, every refusal the number that would have worked."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.models.tiny import make_tiny_llama
from trireme.config import EngineConfig
from trireme.errors import ConfigError, TriremeError
from trireme.launch.commands.plan import make_plan
from trireme.machine.device import DeviceFacts
from trireme.model.reader import ArchSpec
from trireme.resolve import ModelFacts, describe, prepare, resolve
from trireme.settings import load, to_yaml
from trireme.sizes import GIB

SMOL = ArchSpec(
    family="llama",
    num_layers=30,
    hidden=576,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
    ffn=1536,
    vocab_size=49152,
    max_position=8192,
    tie_embeddings=True,
    weights_dtype="gguf",
)
MODEL = ModelFacts(SMOL, "smol", 98 << 20)
LAPTOP = DeviceFacts(cores=2, memory_free=16 * GIB, memory_total=24 * GIB)


def resolved(model=MODEL, device=LAPTOP, **flags):
    return resolve(load(flags, environ={}).config, model, device)


def reasons(decisions):
    return {d.what: (d.value, d.because) for d in decisions}


def refused(**kw) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        resolved(**kw)
    return caught.value


def test_nothing_is_left_undecided_and_everything_decided_is_explained():
    config, decisions = resolved()
    assert config.model.max_len == 8192
    assert config.cache.kv_dtype == "int16"
    assert config.parallel.executor == "inproc"
    assert config.parallel.threads == 2
    assert config.scheduler.max_waiting == 4 * 64
    assert config.scheduler.max_waiting_tokens == 8 * 8192
    assert {"max-len", "kv-dtype", "kv-memory", "executor", "threads"} <= set(reasons(decisions))
    assert all(d.because for d in decisions)


def test_a_resolved_configuration_resolves_to_itself_and_survives_a_file(tmp_path):
    config, _ = resolved(tp=2)
    again, decisions = resolve(config, MODEL, LAPTOP)
    assert again == config
    assert not {"max-len", "kv-memory", "threads"} & set(reasons(decisions))
    (tmp_path / "t.yaml").write_text(to_yaml(config))
    assert load(environ={}, file=tmp_path / "t.yaml").config == config


def test_what_was_asked_is_kept():
    config, decisions = resolved(max_len=100, kv_dtype="bfloat16", threads=7, kv_memory="1GiB", max_waiting=3)
    assert config.model.max_len == 100
    assert config.cache.kv_dtype == "bfloat16"
    assert config.parallel.threads == 7
    assert config.cache.kv_memory == "1GiB"
    assert config.scheduler.max_waiting == 3
    assert not {"max-len", "kv-dtype", "threads", "kv-memory", "max-waiting"} & set(reasons(decisions))


@pytest.mark.parametrize("stored", ["float32", "bfloat16", "float16"])
def test_kv_follows_the_type_of_dense_weights(stored):
    arch = msgspec.structs.replace(SMOL, weights_dtype=stored)
    config, _ = resolved(ModelFacts(arch, "m", 1))
    assert config.model.dtype == config.cache.kv_dtype == stored


def test_odd_blocks_hold_no_integers():
    config, _ = resolved(block_size=15)
    assert config.cache.kv_dtype == "float16"


def test_uneven_heads_and_layers_are_told():
    _, decisions = resolved(tp=2, pp=4, device=msgspec.structs.replace(LAPTOP, cores=8))
    told = reasons(decisions)
    assert "2 + 1" in told["tp"][1]
    assert "8 + 8 + 7 + 7" in told["pp"][1]
    assert told["executor"] == ("procs", "8 workers: a process each")


def test_threads_are_shared_by_all_workers_of_the_machine():
    config, _ = resolved(dp=2, tp=2, device=msgspec.structs.replace(LAPTOP, cores=16))
    assert config.parallel.threads == 4
    config, decisions = resolved(dp=2, tp=2)
    assert config.parallel.threads == 1
    assert "take turns" in reasons(decisions)["cores"][1]


def test_length_above_the_model_names_the_limit():
    error = refused(max_len=8193)
    assert "--max-len is 8193" in str(error)
    assert "8192" in str(error)
    assert error.hint == "--max-len 8192"


def test_length_above_the_kv_memory_names_both_ways_out():
    error = refused(max_len=8192, kv_memory="10MiB")
    assert "8192 tokens needs 186 MiB" in str(error)
    shorter, larger = error.hint.split("\n")
    for cure in (shorter, larger):
        flag, value, *_ = cure.split()
        flags = {"max_len": 8192, "kv_memory": "10MiB"} | {flag[2:].replace("-", "_"): value}
        assert resolved(**flags)  # each hint works when it is pasted


def test_length_shrinks_to_a_small_kv_memory_when_none_was_asked():
    config, decisions = resolved(kv_memory="10MiB")
    assert config.model.max_len == 432
    assert "8192" in reasons(decisions)["max-len"][1]
    assert resolved(num_blocks=4)[0].model.max_len == 64


def test_kv_memory_stays_within_its_share_of_the_machine():
    small = DeviceFacts(cores=2, memory_free=GIB, memory_total=2 * GIB)
    config, _ = resolved(device=small, dp=2)
    per_worker = int(config.cache.kv_memory.removesuffix("MiB")) << 20
    assert 0 < 2 * per_worker < 0.4 * GIB


@pytest.mark.parametrize("max_len", [1, 16, 17, 2048, 2049, 8191])
def test_memory_counted_for_one_request_holds_it(max_len):
    """Whatever the size of a token: rounding to whole MiB must not take a block away."""
    for kv_dtype in ("auto", "int8", "float32"):
        config, _ = resolved(max_num_seqs=1, max_len=max_len, kv_dtype=kv_dtype)
        assert config.model.max_len == max_len


def test_an_asked_length_may_take_more_than_the_usual_share():
    """But not more than is left beside the weights, the programs and a step."""
    small = DeviceFacts(cores=2, memory_free=800 << 20, memory_total=GIB)
    assert resolved(device=small, kv_dtype="float32")[0].model.max_len < 8192
    assert resolved(device=small, kv_dtype="float32", max_len=8192)[0].model.max_len == 8192
    smaller = DeviceFacts(cores=2, memory_free=700 << 20, memory_total=GIB)
    assert "there is room for" in refused(device=smaller, kv_dtype="float32", max_len=8192).message


@pytest.mark.parametrize(
    ("flags", "flag"),
    [
        ({"kv_memory": "64GiB"}, "--kv-memory"),
        ({"kv_memory": "100TiB"}, "--kv-memory"),
        ({"kv_memory": "17GiB"}, "--kv-memory"),
        ({"kv_memory": "9GiB", "dp": 2}, "--kv-memory"),
        ({"num_blocks": 100_000}, "--num-blocks"),
    ],
)
def test_more_kv_memory_than_is_free_is_refused_with_what_fits(flags, flag):
    error = refused(**flags)
    assert f"with {flag} {next(iter(flags.values()))} it needs " in error.message
    assert "more than is free" in error.message
    cure, value, _ = error.hint.split("\n")[0].split()
    assert cure == flag
    name = flag[2:].replace("-", "_")
    config, _ = resolved(**{**flags, name: value})
    assert getattr(config.cache, name) in (value, int(value) if value.isdecimal() else None)
    plan = make_plan(load(flags, environ={}).config, MODEL, LAPTOP)
    assert (plan.refusal, plan.cures) == (error.message, error.hint.split("\n"))


def test_what_the_parts_hold_already_is_not_counted_twice():
    """Up to what programs take: the rest of a caller's own process is no room for a deployment."""
    bare, begun, large = (
        DeviceFacts(cores=2, memory_free=GIB, memory_total=2 * GIB, memory_held=held << 20) for held in (0, 100, 10_000)
    )
    most = [int(refused(device=device, kv_memory="9GiB").hint.split()[1][:-3]) for device in (bare, begun, large)]
    assert most[1] - most[0] == pytest.approx(100, abs=3)
    assert most[2] - most[0] == pytest.approx(48 + 80 + 40, abs=4)


def test_blocks_of_a_model_without_layers_cost_memory_too():
    stub = MODEL._replace(arch=msgspec.structs.replace(SMOL, family="stub"))
    for blocks in (100_000_000, 10**12):
        error = refused(model=stub, num_blocks=blocks)
        assert f"--num-blocks {blocks}" in error.message
        resolved(model=stub, num_blocks=int(error.hint.split()[1]), max_len=100)
    vast = DeviceFacts(cores=2, memory_free=1 << 46, memory_total=1 << 46)
    error = refused(model=stub, device=vast, num_blocks=1 << 28)
    assert "more than 2147483647 tokens" in error.message
    assert error.hint == f"--num-blocks {(1 << 27) - 1}"


def test_more_threads_than_can_be_of_use_are_refused():
    assert resolved(threads=8)[0].parallel.threads == 8
    for threads in (9, 5000, 100_000):
        error = refused(threads=threads)
        assert f"--threads is {threads}; at most 8 per worker" in error.message
        assert error.hint == "--threads 2"


def test_a_step_that_no_memory_holds_is_refused():
    error = refused(max_num_tokens=1 << 40)
    assert "more than is free" in error.message
    assert "--max-num-tokens 256" in error.hint


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"tp": 4}, ["tp=4", "3 KV heads"]),
        ({"pp": 31}, ["--pp is 31", "30 layers"]),
        ({"tp": 2, "executor": "inproc"}, ["--executor inproc", "2"]),
    ],
)
def test_impossible_meshes_are_refused(flags, words):
    for word in words:
        assert word in str(refused(**flags))


def test_weights_larger_than_the_machine():
    error = refused(model=ModelFacts(SMOL, "big", 100 * GIB))
    assert "100 GiB" in str(error)
    assert "24 GiB" in str(error)


def test_steps_are_small_but_hold_all_decoding_rows():
    assert resolved()[0].scheduler.max_num_tokens == 256
    assert resolved(max_num_seqs=200)[0].scheduler.max_num_tokens == 400
    assert resolved(max_num_seqs=200, max_num_tokens=64)[0].scheduler.max_num_tokens == 64
    assert resolved(max_len=100)[0].scheduler.max_waiting_tokens == 16384
    assert resolved(max_len=4096)[0].scheduler.max_waiting_tokens == 8 * 4096


def test_uncut_prompts_need_a_budget_of_the_longest():
    assert resolved(chunk=0, max_len=4096)[0].scheduler.max_num_tokens == 4096
    assert resolved(chunk=0, max_len=100)[0].scheduler.max_num_tokens == 256


def test_a_model_on_disk(tmp_path):
    prepared = prepare(load({"model": str(make_tiny_llama(tmp_path))}, environ={}).config, device=LAPTOP)
    assert prepared.config.model.served_name == tmp_path.name
    assert prepared.config.model.dtype == "float32"
    assert prepared.model.weight_bytes > 0
    assert describe(prepared.model.arch).startswith("llama, 0.")


@settings(max_examples=200, deadline=None)
@given(
    st.fixed_dictionaries(
        {},
        optional={
            "tp": st.integers(1, 12),
            "pp": st.integers(1, 32),
            "dp": st.integers(1, 4),
            "max_len": st.integers(1, 10000),
            "num_blocks": st.integers(1, 2000),
            "kv_memory": st.sampled_from(["1MiB", "64MiB", "8GiB"]),
            "chunk": st.integers(0, 64),
            "max_num_tokens": st.integers(1, 4096),
        },
    ),
    st.integers(1, 64),
    st.integers(1, 64),
)
def test_every_request_is_resolved_whole_or_refused_as_ours(flags, cores, gib):
    device = DeviceFacts(cores=cores, memory_free=gib * GIB // 2, memory_total=gib * GIB)
    try:
        config, _ = resolved(device=device, **flags)
    except TriremeError:
        return
    assert config.model.max_len <= SMOL.max_position
    assert config.parallel.threads >= 1
    assert config.cache.kv_memory or config.cache.num_blocks
    assert isinstance(config, EngineConfig)
    assert resolve(config, MODEL, device)[0] == config
