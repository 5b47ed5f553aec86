"""Budget arithmetic: sizes both ways, blocks from the poorest worker, a container's limits over the machine's."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trireme.errors import ConfigError
from trireme.machine.device import read_device
from trireme.machine.memory_budget import kv_token_bytes, num_kv_blocks
from trireme.settings import load
from trireme.sizes import GIB, MIB, format_bytes, parse_bytes
from trireme.topology.mesh import Mesh


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("512MiB", 512 * MIB), ("4GiB", 4 * GIB), ("1.5g", 3 * GIB // 2), (" 2 kb ", 2000), ("1T", 1 << 40)],
)
def test_sizes(text, size):
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "x", "-1", "1e9", "4 apples", "0", "1.2.3", "GiB"])
def test_sizes_that_are_none(text):
    with pytest.raises(ValueError, match="size"):
        parse_bytes(text)


@given(st.integers(1, 1 << 50))
def test_a_printed_size_is_true_to_three_digits(size):
    assert parse_bytes(format_bytes(size)) == pytest.approx(size, rel=0.006)


def blocks(workers, **flags):
    return num_kv_blocks(load(flags, environ={}).config, workers)


def test_the_poorest_worker_decides():
    assert blocks([(1000, 50_000), (500, 20_000)], max_len=16)[0] == 40
    assert blocks([(1000, 50_000), (2000, 20_000)], max_len=16, kv_memory="8kb")[0] == 4


def test_named_blocks_need_no_arithmetic():
    count, decision = blocks([(1000, 0)], num_blocks=7, max_len=16)
    assert count == 7
    assert decision.because == "--num-blocks"


def test_less_than_one_request_is_refused():
    with pytest.raises(ConfigError, match="one request of 100 tokens") as caught:
        blocks([(1600, 8000)], max_len=100)
    assert "--max-len 80 " in caught.value.hint


def test_kv_of_a_token_is_that_of_the_fullest_worker():
    from tests.unit.test_resolve import SMOL

    assert kv_token_bytes(SMOL, "float16", Mesh(1, 1, 1)) == 2 * 30 * 3 * 64 * 2
    assert kv_token_bytes(SMOL, "int16", Mesh(1, 1, 1)) == 2 * 30 * 3 * (64 * 2 + 4)
    assert kv_token_bytes(SMOL, "int8", Mesh(1, 1, 1)) == 2 * 30 * 3 * (64 + 4)
    assert kv_token_bytes(SMOL, "float16", Mesh(1, 1, 2)) == 2 * 30 * 2 * 64 * 2
    assert kv_token_bytes(SMOL, "float32", Mesh(1, 4, 3)) == 2 * 8 * 1 * 64 * 4


def machine(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal: 16000000 kB\nMemFree: 1 kB\nMemAvailable: 8000000 kB\n"


def test_a_bare_machine(tmp_path):
    files = {"proc/meminfo": MEMINFO, "proc/cpuinfo": "model name : Oar 3\nflags : fpu avx2 avx512_vnni\n"}
    facts = read_device(machine(tmp_path, {**files, "dev/nvidia0": "", "dev/nvidiactl": ""}))
    assert (facts.memory_total, facts.memory_free) == (16000000 * 1024, 8000000 * 1024)
    assert facts.cpu == "Oar 3"
    assert facts.isa == ("avx2", "avx512_vnni")
    assert facts.num_gpus == 1


def test_a_container_has_its_own_limits(tmp_path):
    cgroup = {
        "sys/fs/cgroup/cpu.max": "100000 100000\n",
        "sys/fs/cgroup/memory.max": f"{GIB}\n",
        "sys/fs/cgroup/memory.current": f"{GIB // 2}\n",
        "sys/fs/cgroup/memory.stat": f"anon 1\ninactive_file {GIB // 4}\n",
    }
    facts = read_device(machine(tmp_path, {"proc/meminfo": MEMINFO, **cgroup}))
    assert facts.cores == 1
    assert facts.memory_total == GIB
    assert facts.memory_free == GIB * 3 // 4


def test_what_a_process_and_its_children_hold(tmp_path):
    status = "Name:\tx\nRssAnon:\t    {} kB\nRssFile:\t 900 kB\nRssShmem:\t 1 kB\n"
    files = {f"proc/{name}/status": status.format(size) for name, size in (("self", 100), ("7", 20), ("8", 3))}
    tree = {"proc/self/task/5/children": "7 ", "proc/self/task/6/children": "9 \n", "proc/meminfo": MEMINFO}
    assert read_device(machine(tmp_path, {**files, **tree})).memory_held == (101 + 21) * 1024


def test_this_machine_has_cores_and_memory():
    facts = read_device()
    assert facts.cores >= 1
    assert 0 < facts.memory_free <= facts.memory_total
