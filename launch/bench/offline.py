"""`trireme bench latency` and `trireme bench throughput`: the engine through the Python API, without HTTP.

Prompts are random token ids, sampling is greedy and end-of-text is ignored, so that only lengths matter.
"""

from __future__ import annotations

import asyncio
import time

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.api.llm import AsyncLLM, patient
from trireme.launch.bench.samples import RunSummary, Sample, make_ids, publish, summarize
from trireme.launch.options import Invocation
from trireme.params import SamplingParams


def run(invocation: Invocation) -> int:
    """Prints the summary of each measured run."""
    return asyncio.run(_run(invocation))


async def _run(invocation: Invocation) -> int:
    options = invocation.options
    measure = _measure_latency if invocation.command.name == "bench latency" else _measure_throughput
    async with AsyncLLM(_quiet(invocation)) as llm:
        longest = options["input_len"] * (1 if measure is _measure_latency else 2) + options["output_len"]
        if longest > (llm.config.model.max_len or 0):
            raise ConfigError(
                f"the longest request would have {longest} tokens; the context is {llm.config.model.max_len}",
                hint="--input-len and --output-len, smaller",
            )
        await measure(llm, invocation, -1)  # warm-up: first touch of memory, threads, caches
        rows = [RunSummary(f"run {i + 1}", await measure(llm, invocation, i)) for i in range(options["repeats"])]
        publish(invocation, llm.config.model.served_name or "", rows, llm.config)
    return 0


def _quiet(invocation: Invocation) -> EngineConfig:
    config = patient(invocation.loaded)
    if "launch.log_level" in invocation.loaded.sources:
        return config
    return msgspec.structs.replace(config, launch=msgspec.structs.replace(config.launch, log_level="warning"))


async def _measure_latency(llm: AsyncLLM, invocation: Invocation, run_idx: int) -> dict[str, float]:
    """Three requests, one after the other."""
    options = invocation.options
    begun = time.perf_counter()
    samples = [
        await _one(llm, options["input_len"], options["output_len"], seed=3 * (run_idx + 1) + i) for i in range(3)
    ]
    figures = summarize(samples, time.perf_counter() - begun)
    figures["prefill_tok_s"] = options["input_len"] / (figures["ttft_p50_ms"] / 1e3)
    return figures


async def _measure_throughput(llm: AsyncLLM, invocation: Invocation, run_idx: int) -> dict[str, float]:
    """All requests at once; prompt lengths are spread evenly from an eighth of the mean to nearly twice the mean."""
    options = invocation.options
    count, mean = options["num_requests"], options["input_len"]
    low, high = max(1, mean // 8), max(1, 2 * mean - mean // 8)
    if run_idx < 0:
        count = min(count, 4)
    lengths = [low + (high - low) * i // max(count - 1, 1) for i in range(count)]
    seeds = range((run_idx + 2) * 100_000, (run_idx + 2) * 100_000 + count)
    begun = time.perf_counter()
    work = [_one(llm, n, options["output_len"], seed=seed) for n, seed in zip(lengths, seeds, strict=True)]
    samples = await asyncio.gather(*work)
    return summarize(samples, time.perf_counter() - begun)


async def _one(llm: AsyncLLM, input_len: int, output_len: int, *, seed: int) -> Sample:
    params = SamplingParams(max_tokens=output_len, temperature=0.0, ignore_eos=True)
    prompt = make_ids(input_len, llm.vocab_size, seed)
    times, num_output = [], 0
    sent = time.perf_counter()
    async for delta in llm.stream(prompt, params):
        if delta.token_ids:
            times.append(time.perf_counter())
            num_output += len(delta.token_ids)
    return Sample(sent, tuple(times), input_len, num_output)
