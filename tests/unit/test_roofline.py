"""Costs of steps against counts made by hand, the bound, the picture, and the loops behind the ceilings."""

from __future__ import annotations

import shutil

import msgspec
import pytest

from scripts.roofline import STEPS, Roof, Step, bound_of, picture, seen_by_prompt, step_cost, windows, write_page
from trireme.model.files import find_model
from trireme.model.gguf_header import read_gguf
from trireme.model.reader import read_arch

# SmolLM2-135M: hidden 576, 9 heads of 64, 3 of keys and values, 1536 inside the MLP, 30 layers, 49152 tokens.
LAYER = 576 * (576 + 192 + 192 + 576) + 3 * 576 * 1536
HEAD = 576 * 49152


@pytest.fixture(scope="module")
def smollm2():
    files = find_model("smollm2")
    return read_gguf(files.path), read_arch(files)


def test_a_decode_step_reads_every_weight_once_and_the_context_of_each_row(smollm2):
    cost = step_cost(*smollm2, Step("", rows=4, context=100))
    assert cost.weight_bytes == 30 * LAYER // 32 * 20 + HEAD // 32 * 34
    assert cost.kv_bytes == 4 * (100 + 1) * 30 * 2 * 3 * (64 * 2 + 4)
    assert cost.int8_ops == 4 * 2 * (30 * LAYER + HEAD)
    assert cost.float_ops == 4 * 100 * 30 * 2 * 2 * 9 * 64


def test_a_prompt_meets_the_output_matrix_once(smollm2):
    cost = step_cost(*smollm2, Step("", rows=1, context=0, chunk=512))
    assert cost.int8_ops == 2 * (512 * 30 * LAYER + HEAD)
    assert cost.float_ops == 512 * 513 // 2 * 30 * 2 * 2 * 9 * 64


@pytest.mark.parametrize(("tokens", "window"), [(1, 5), (5, 5), (9, 5), (64, 1)])
def test_tokens_seen_by_a_prompt_are_those_counted_one_by_one(tokens, window):
    assert seen_by_prompt(tokens, window) == sum(min(position + 1, window) for position in range(tokens))


def test_layers_with_a_window_read_no_more_than_it(smollm2):
    file, arch = smollm2
    near = msgspec.structs.replace(arch, sliding_window=16, full_attention_layers=(29,))
    assert windows(near).count(16) == 29
    cost = step_cost(file, near, Step("", rows=1, context=100))
    assert cost.float_ops == (29 * 16 + 100) * 2 * 2 * 9 * 64


def test_the_bound_of_one_row_is_memory_and_of_many_is_compute(smollm2):
    roof = Roof(read=20.0, int8=400.0, fma=150.0)
    one = bound_of(step_cost(*smollm2, STEPS[0]), roof)
    many = bound_of(step_cost(*smollm2, STEPS[-1]), roof)
    assert one.least == one.memory > one.compute
    assert many.least == many.compute > many.memory


def test_a_point_under_the_roof_is_drawn_under_it():
    lines = picture([("a", 10.0, 50.0)], Roof(read=20.0, int8=400.0, fma=150.0)).splitlines()
    row, column = next((i, line.index("a")) for i, line in enumerate(lines) if "a" in line)
    above = [i for i, line in enumerate(lines) if len(line) > column and line[column] in "/-" and "+" not in line]
    assert above
    assert max(above) < row


def test_the_page_without_measurements_says_what_the_headers_tell(smollm2, monkeypatch):
    monkeypatch.setattr("scripts.roofline.MODELS", ("smollm2",))
    page = write_page(dry=True)
    assert "| a | decode, 1 row | 96.4 |" in page
    assert "trireme bench latency smollm2" in page


@pytest.mark.skipif(shutil.which("cc") is None and shutil.which("gcc") is None, reason="no C compiler")
def test_the_loops_do_what_they_count():
    from trireme.models.cpu.bench.ceilings import build_loops, rate

    loops = build_loops()
    if loops.ceiling_fma(1):
        assert loops.ceiling_fma(3) == 3 * loops.ceiling_fma(1)
        assert loops.ceiling_int8(1) >= loops.ceiling_fma(1)
        assert 1 < rate(lambda _: loops.ceiling_fma(200_000), 1) < 2000
    block = bytes(1 << 16)
    assert loops.ceiling_read(block, len(block)) == len(block)
