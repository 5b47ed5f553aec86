"""`trireme plan` and `trireme models inspect`: sums that add up, refusals with cures that work, output that is bounded."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from trireme.config import CacheConfig, EngineConfig, ModelConfig, ParallelConfig
from trireme.errors import ModelError
from trireme.launch.cli import main
from trireme.launch.commands.inspect_model import inspect_files, read_safetensors
from trireme.launch.commands.plan import make_plan, suggested_flags
from trireme.machine.device import DeviceFacts
from trireme.machine.memory_budget import memory_shares, num_params
from trireme.machine.step_costs import ANY_CORE
from trireme.model.files import ModelFiles
from trireme.model.spec import ArchSpec
from trireme.resolve import ModelFacts, resolve
from trireme.settings import load
from trireme.sizes import GIB, MIB

ARCH = ArchSpec(
    family="llama", num_layers=32, hidden=4096, num_heads=32, num_kv_heads=8, head_dim=128, ffn=14336,
    vocab_size=128256, max_position=131072, weights_dtype="bfloat16",
)  # fmt: skip
MODEL = ModelFacts(ARCH, "big", 16 * GIB)
TOKEN_BYTES = 2 * 32 * 8 * 128 * 2


def device(free: int) -> DeviceFacts:
    return DeviceFacts(cores=8, memory_free=free, memory_total=64 * GIB)


def test_a_plan_that_fits_adds_up_and_its_flags_give_it_again():
    plan = make_plan(EngineConfig(model=ModelConfig(model="big")), MODEL, device(48 * GIB))
    assert not plan.refusal
    assert plan.total == sum(share.holders * share.each for share in plan.shares) <= 48 * GIB
    by_name = {share.what: share for share in plan.shares}
    assert by_name["weights"].total == 16 * GIB
    assert plan.largest_len == by_name["KV cache"].each // TOKEN_BYTES // 16 * 16
    assert plan.possible_len >= plan.largest_len
    assert all(c.at_once == plan.largest_len // c.tokens for c in plan.contexts if c.tokens <= plan.largest_len)
    words = suggested_flags(plan)
    settings = {flag[2:].replace("-", "_"): value for flag, value in zip(words[::2], words[1::2], strict=True)}
    again, _ = resolve(load(settings, environ={}).config, MODEL, device(30 * GIB))
    assert again.model.max_len == plan.config.model.max_len
    assert again.cache == plan.config.cache


def test_a_plan_tells_roughly_how_long_steps_take():
    plan = make_plan(EngineConfig(model=ModelConfig(model="big")), MODEL, device(48 * GIB))
    assert plan.steps is not None
    read_s = 16 * GIB / (8 * ANY_CORE.read)
    assert read_s < plan.steps.one < 1.2 * read_s
    compute_s = 2048 * 2 * num_params(ARCH) / (8 * ANY_CORE.linear)
    assert compute_s < plan.steps.prompt < 1.2 * compute_s + 9 * read_s
    assert plan.steps.one < plan.steps.full


def test_a_refused_length_comes_with_cures_that_fit():
    config = EngineConfig(model=ModelConfig(max_len=131072), cache=CacheConfig(kv_memory="1GiB"))
    plan = make_plan(config, MODEL, device(48 * GIB))
    assert "131072 tokens" in plan.refusal
    largest = int(plan.cures[0].split()[1])
    cured = msgspec.structs.replace(config, model=ModelConfig(max_len=largest))
    assert not make_plan(cured, MODEL, device(48 * GIB)).refusal


def test_too_much_kv_memory_is_refused_with_what_would_fit():
    config = EngineConfig(cache=CacheConfig(kv_memory="40GiB"))
    plan = make_plan(config, MODEL, device(48 * GIB))
    assert "more than is free" in plan.refusal
    fits = plan.cures[0].split()[1]
    assert not make_plan(EngineConfig(cache=CacheConfig(kv_memory=fits)), MODEL, device(48 * GIB)).refusal
    assert plan.possible_len <= 131072


def test_shares_count_every_worker():
    config = EngineConfig(parallel=ParallelConfig(dp=2, tp=2, pp=2))
    shares = {share.what: share for share in memory_shares(config, ARCH, 8 * GIB, 100 * MIB)}
    assert shares["weights"].total == 2 * 8 * GIB
    assert shares["KV cache"].total == 8 * 100 * MIB


@pytest.mark.parametrize(
    ("options", "factor"),
    [({}, 1.0), ({"dtype": "float32"}, 2.0), ({"quantize": "q8_0"}, 34 / 64), ({"quantize": "q4_0"}, 18 / 64)],
)
def test_weights_count_at_the_size_they_have_in_memory(options, factor):
    stored = num_params(ARCH) * 2
    plan = make_plan(EngineConfig(model=ModelConfig(**options)), MODEL._replace(weight_bytes=stored), device(64 * GIB))
    weights = next(share for share in plan.shares if share.what == "weights")
    assert weights.total == pytest.approx(stored * factor)


def test_a_model_that_only_fits_when_rounded_is_told_so():
    plan = make_plan(EngineConfig(cache=CacheConfig(kv_memory="1GiB")), MODEL, device(14 * GIB))
    assert any("--quantize q8_0" in cure for cure in plan.cures)
    config = EngineConfig(model=ModelConfig(quantize="q8_0"), cache=CacheConfig(kv_memory="1GiB"))
    assert not make_plan(config, MODEL, device(14 * GIB)).refusal


def test_integer_keys_and_values_count_with_their_scales():
    config = EngineConfig(cache=CacheConfig(kv_dtype="int8", num_blocks=1000))
    plan = make_plan(config, MODEL, device(48 * GIB))
    cache = next(share for share in plan.shares if share.what == "KV cache")
    assert cache.total == 1000 * 16 * 2 * 32 * 8 * (128 + 4)


def write_safetensors(path: Path, entries: dict[str, object], data: bytes) -> None:
    head = json.dumps(entries).encode()
    path.write_bytes(struct.pack("<Q", len(head)) + head + data)


def model_dir(path: Path) -> Path:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    entries |= {f"w{i}": {"dtype": "F32", "shape": [4, 2], "data_offsets": [32 * i, 32 * i + 32]} for i in range(100)}
    write_safetensors(path / "model.safetensors", entries, bytes(3200))
    (path / "config.json").write_text(json.dumps({"model_type": "mystery", "note": "x" * 10_000}))
    tokens = {"model": {"type": "BPE", "vocab": {"a": 0, "<s>": 1}}, "added_tokens": [{"id": 1, "content": "<s>"}]}
    (path / "tokenizer.json").write_text(json.dumps(tokens))
    (path / "chat_template.jinja").write_text("{{ messages }}" * 1000)
    return path


def test_inspection_of_an_unsupported_directory_is_bounded(tmp_path):
    facts = inspect_files(ModelFiles("safetensors", model_dir(tmp_path), "mystery"))
    assert not facts["supported"]
    assert "mystery" in facts["refusal"]
    assert (facts["num_tensors"], facts["num_params"], facts["nbytes"]) == (100, 800, 3200)
    assert facts["types"] == [{"type": "F32", "tensors": 100, "params": 800, "nbytes": 3200, "bits": 32.0}]
    assert facts["tokenizer"]["size"] == 2
    assert facts["template"]["characters"] == 14_000
    assert len(json.dumps(facts)) < 20_000


@pytest.mark.parametrize("raw", [b"", b"\xff" * 8, struct.pack("<Q", 2) + b"[]", struct.pack("<Q", 9) + b'{"a":{}} '])
def test_files_that_are_no_safetensors(tmp_path, raw):
    (tmp_path / "x.safetensors").write_bytes(raw)
    with pytest.raises(ModelError, match="not a safetensors file"):
        read_safetensors(tmp_path / "x.safetensors")


def test_commands_answer_in_json_with_the_exit_status_of_the_answer(capsys):
    assert main(["plan", "smollm2", "--kv-memory", "900GiB", "--json"]) == 1
    told = json.loads(capsys.readouterr().out)
    assert told["fits"] is False
    assert told["cures"]
    assert main(["models", "inspect", "smollm2", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert {row["type"] for row in facts["types"]} == {"Q4_1", "Q8_0", "F32"}
    assert facts["tokenizer"]["size"] == facts["shape"]["vocab_size"] == 49152


def test_neither_command_imports_tensors():
    modules = "trireme.launch.commands.plan, trireme.launch.commands.inspect_model"
    code = f"import sys, {modules}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
