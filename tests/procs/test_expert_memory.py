"""What a step of engines that split experts takes, against what the budget sets aside for it: real workers, read from /proc."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from tests.models.test_families_more import make
from tests.models.tiny import write_byte_tokenizer
from tests.procs.fake_llm import prompt_of
from tests.procs.test_lockstep import workers
from trireme import AsyncLLM, SamplingParams
from trireme.config import EngineConfig, ParallelConfig, SchedulerConfig
from trireme.machine.memory_budget import activation_bytes, memory_shares, num_params
from trireme.model.files import find_model
from trireme.model.reader import read_arch
from trireme.sizes import MIB

pytestmark = pytest.mark.timeout(180)

TOKENS = 1024
WIDE: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 512, "max_position_embeddings": 4096}
ONE = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)


def status(pid: int, name: str) -> int:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))


async def grown(llm: AsyncLLM) -> list[int]:
    """By how much the memory of each worker's process was larger at its peak, in a step of TOKENS tokens of one engine."""
    pids = [one["pid"] for one in await workers(llm)]
    await llm.generate(prompt_of(1, 0), ONE)  # what is made once is there
    before = []
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak begins anew
        before.append(status(pid, "VmRSS"))
    await llm.generate(prompt_of(TOKENS, 1), ONE)
    return [status(pid, "VmHWM") - held for pid, held in zip(pids, before, strict=True)]


@pytest.mark.parametrize(("name", "top_k"), [("gpt_oss", 4), ("llama4", 1)])
async def test_a_step_takes_what_was_set_aside_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, top_k: int
) -> None:
    if not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("the peak of a process cannot be read anew here")
    monkeypatch.setenv(
        "GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072"
    )  # what is freed leaves the process at once
    path = make(tmp_path, name, **WIDE, num_experts_per_tok=top_k)
    write_byte_tokenizer(path)
    arch = read_arch(find_model(str(path)))
    scheduler = SchedulerConfig(max_num_seqs=4, max_num_tokens=TOKENS)
    logits = activation_bytes(arch, SchedulerConfig(max_num_seqs=4, max_num_tokens=1), 2)
    counted = activation_bytes(arch, scheduler, 2) - logits
    asked: dict[str, Any] = {"max_num_seqs": 4, "max_num_tokens": TOKENS, "kv_memory": "4MiB", "max_len": 2048}
    async with AsyncLLM(path, **asked, threads=1, dp=2, ep=True) as llm:
        peaks = await grown(llm)
    assert 0.7 * counted < max(peaks) <= counted


def test_experts_count_once_for_all_engines_that_split_them(tmp_path: Path) -> None:
    arch = read_arch(find_model(str(make(tmp_path, "gpt_oss"))))
    whole = 100 * MIB

    def weights(*, ep: bool) -> int:
        config = EngineConfig(parallel=ParallelConfig(dp=4, ep=ep))
        return next(share.total for share in memory_shares(config, arch, whole, MIB) if share.what == "weights")

    assert weights(ep=False) == 4 * whole
    experts = 2 * 4 * 3 * arch.hidden * arch.ffn / num_params(arch)
    assert weights(ep=True) == pytest.approx(whole * (experts + 4 * (1 - experts)), rel=1e-6)
