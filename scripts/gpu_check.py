"""Checks and times the CUDA kernels on a machine with an NVIDIA GPU, torch for CUDA and nvcc, without network: `make gpu-check`.

    python scripts/gpu_check.py build | test | ops | step | all      [--json FILE] [--batches 1,32] [-- pytest's options]

`build` compiles, `test` runs tests/gpu, `ops` times each op against its floor, `step` a Llama-3.1-8B-shaped decode step captured
in a graph. The floor is bytes / measured bandwidth or operations / measured rate, whichever is longer.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
NO_CARD = 3
L2_BYTES = 160 << 20  # inputs rotate over at least this much memory, so that no cache serves them
BLOCK_SIZE = 16
VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, DIM, LAYERS = 128256, 4096, 14336, 32, 8, 128, 32
WIDTH_QKV = (HEADS + 2 * KV_HEADS) * DIM
LLAMA_8B = {
    "model_type": "llama",
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": FFN,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": DIM,
    "max_position_embeddings": 16384,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
}
STEPS = ((1, 256), (8, 256), (32, 256), (64, 256), (128, 256), (256, 256), (16, 8192))  # batch size, context of each


# ---------------------------------------------------------------- reports


@dataclass(frozen=True, slots=True)
class Ceilings:
    """Measured ceilings of the GPU: bytes and bfloat16 operations per second."""

    bytes_per_s: float
    ops_per_s: float


@dataclass(frozen=True, slots=True)
class Timing:
    """One measured launch or step, in microseconds. `rival_us` is the alternative's time, 0 for none."""

    name: str
    shape: str
    us: float
    floor_us: float
    rival_us: float = 0.0

    def line(self) -> str:
        rival = f"{self.rival_us:10.1f}" if self.rival_us else ""
        floor = f"floor {self.floor_us:9.1f}  {self.us / self.floor_us:5.2f}x"
        return f"  {self.name:18} {self.shape:24} {self.us:9.1f} us  {floor}{rival}"


class Report:
    """Prints as it goes and keeps the facts for --json."""

    def __init__(self) -> None:
        self.facts: dict[str, Any] = {}

    def say(self, text: str) -> None:
        print(text, flush=True)

    def add(self, part: str, timing: Timing) -> None:
        self.facts.setdefault(part, []).append(asdict(timing))
        self.say(timing.line())


def run_command(report: Report, name: str, command: Sequence[str]) -> bool:
    """Runs in the repository's root with its output shown; True if it succeeded."""
    started = time.monotonic()
    code = subprocess.run(command, cwd=ROOT).returncode
    seconds = round(time.monotonic() - started, 1)
    report.facts[name] = {"seconds": seconds, "exit_code": code}
    report.say(f"{name}: {'done' if code == 0 else f'failed with exit code {code}'} in {seconds} s")
    return code == 0


# ---------------------------------------------------------------- timing


def time_launches(launches: Sequence[Callable[[], object]], repeats: int = 5) -> float:
    """Microseconds per launch: all of them captured in one graph, median of several replays."""
    import torch

    for launch in launches[:2]:
        launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for launch in launches:
            launch()
    graph.replay()
    found = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) * 1e3 / len(launches))
    return sorted(found)[repeats // 2]


def measure_ceilings() -> Ceilings:
    """The best bandwidth for 1 GiB (of a copy, a scaling, sums), and the rate of a bfloat16 GEMM of 8192 x 8192 x 8192."""
    import torch

    source = torch.ones(1 << 28, device="cuda", dtype=torch.float32)
    target, total = torch.empty_like(source), torch.empty((), device="cuda")
    ways: tuple[tuple[int, Callable[[], object]], ...] = (
        (2, lambda: target.copy_(source)),
        (2, lambda: torch.mul(source, 2, out=target)),
        (1, lambda: torch.sum(source, 0, out=total)),
        (1, lambda: torch.amax(source, 0, out=total)),
    )
    bandwidth = max(times * source.nbytes / time_launches([way] * 4) for times, way in ways)
    a, b, out = (torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    multiplied = time_launches([lambda: torch.mm(a, b, out=out)] * 4)
    return Ceilings(bandwidth * 1e6, 2 * 8192**3 / multiplied * 1e6)


def floor_us(ceilings: Ceilings, num_bytes: float, operations: float = 0.0) -> float:
    return max(num_bytes / ceilings.bytes_per_s, operations / ceilings.ops_per_s) * 1e6


# ---------------------------------------------------------------- ops


@dataclass(frozen=True, slots=True)
class Case:
    """One op at one shape. `make` gives a launch over fresh inputs; `rival` the same for torch's op, where there is one."""

    name: str
    shape: str
    num_bytes: float
    make: Callable[[], Callable[[], object]]
    rival: Callable[[], Callable[[], object]] | None = None
    operations: float = 0.0


def time_case(case: Case, ceilings: Ceilings) -> Timing:
    """Times a case and its rival, over enough copies of the inputs to miss the L2 cache."""
    import torch

    copies = max(2, min(64, math.ceil(L2_BYTES / max(case.num_bytes, 1))))
    rounds = max(1, 16 // copies)
    rival = 0.0
    if case.rival is not None:
        rival = time_launches([case.rival() for _ in range(copies)] * rounds)
        torch.cuda.empty_cache()
    own = time_launches([case.make() for _ in range(copies)] * rounds)
    torch.cuda.empty_cache()
    return Timing(case.name, case.shape, own, floor_us(ceilings, case.num_bytes, case.operations), rival)


def random(*shape: int) -> Any:
    import torch

    return torch.randn(*shape, device="cuda", dtype=torch.bfloat16)


def row_cases() -> Iterator[Case]:
    """Norms, activations, RoPE and lookups: bound by bytes, or by the launch for few tokens."""
    import torch

    from trireme.models.cuda import ops

    fp8 = torch.float8_e4m3fn

    def norm(rows: int) -> Callable[[], object]:
        x, residual, weight, out = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN), random(rows, HIDDEN)
        return lambda: ops.rms_norm(x, weight, 1e-5, out, residual=residual)

    def norm_fp8(rows: int) -> Callable[[], object]:
        x, residual, weight = random(rows, HIDDEN), random(rows, HIDDEN), random(HIDDEN)
        out, scale = torch.empty(rows, HIDDEN, device="cuda", dtype=fp8), torch.empty(rows, device="cuda")
        return lambda: ops.rms_norm_narrow(x, weight, 1e-5, out, scale, residual=residual)

    def quantize(rows: int) -> Callable[[], object]:
        x, scale = random(rows, FFN), torch.empty(rows, device="cuda")
        out = torch.empty(rows, FFN, device="cuda", dtype=fp8)
        return lambda: ops.quantize_rows(x, out, scale)

    def gated(rows: int) -> Callable[[], object]:
        gate_up, out = random(rows, 2 * FFN), random(rows, FFN)
        return lambda: ops.gated_activation(gate_up, out, "silu")

    def rotary(rows: int, dtype: torch.dtype) -> Callable[[], object]:
        kv = make_cache(rows, dtype)
        table = torch.randn(max(rows, 4096), DIM, device="cuda")
        qkv, at = random(rows, WIDTH_QKV), torch.arange(rows, device="cuda", dtype=torch.int32)
        return lambda: ops.rotary_and_cache(qkv, HEADS, kv, table, at, at)

    table = random(VOCAB, HIDDEN)

    def gather(rows: int) -> Callable[[], object]:
        ids, out = torch.randint(0, VOCAB, (rows,), device="cuda", dtype=torch.int32), random(rows, HIDDEN)
        return lambda: ops.gather_rows(table, ids, out)

    for rows in (1, 32, 256, 8192):
        yield Case("rms_norm+residual", f"{rows}x{HIDDEN}", rows * HIDDEN * 8, lambda rows=rows: norm(rows))
        yield Case("rms_norm_fp8", f"{rows}x{HIDDEN}", rows * HIDDEN * 7, lambda rows=rows: norm_fp8(rows))
        yield Case("quantize_rows", f"{rows}x{FFN}", rows * FFN * 3, lambda rows=rows: quantize(rows))
        yield Case("gated_activation", f"{rows}x{FFN}", rows * FFN * 6, lambda rows=rows: gated(rows))
        moved = rows * DIM * (2 * HEADS + 5 * KV_HEADS)
        for dtype, size in ((torch.bfloat16, 2), (fp8, 1)):
            num_bytes = 2 * moved - rows * DIM * 2 * KV_HEADS * (2 - size)
            shape = f"{rows} {str(dtype)[6:14]}"
            yield Case("rotary_and_cache", shape, num_bytes, lambda rows=rows, dtype=dtype: rotary(rows, dtype))
        yield Case("gather_rows", f"{rows}x{HIDDEN}", rows * HIDDEN * 4, lambda rows=rows: gather(rows))


def make_cache(tokens: int, dtype: Any) -> Any:
    """A paged KV cache for `tokens` tokens, filled with random values of `dtype`."""
    import torch

    from trireme.models.cuda.ops import CudaPagedKV

    shape = (-(-tokens // BLOCK_SIZE), KV_HEADS, BLOCK_SIZE, DIM)
    return CudaPagedKV(*(torch.randn(shape, device="cuda", dtype=torch.bfloat16).to(dtype) for _ in range(2)))


def attention_cases() -> Iterator[Case]:
    """Decode attention of a batch at one context length, bound by reading the cache."""
    import torch

    from trireme.models.cuda import ops

    def attention(rows: int, context: int, splits: int, dtype: torch.dtype) -> Callable[[], object]:
        blocks = context // BLOCK_SIZE
        kv = make_cache(rows * context, dtype)
        table = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
        contexts = torch.full((rows,), context, device="cuda", dtype=torch.int32)
        q, out = random(rows, HEADS * DIM), random(rows, HEADS * DIM)
        scratch = torch.empty(max(1, ops.decode_scratch(rows, HEADS, DIM, splits)), device="cuda")
        return lambda: ops.decode_attention(
            q, HEADS, kv, table, contexts, DIM**-0.5, out, splits=splits, scratch=scratch
        )

    for rows, context in ((1, 256), (32, 256), (256, 256), (1, 8192), (16, 8192)):
        splits = choose_splits(rows, context)
        for dtype, size in ((torch.bfloat16, 2), (torch.float8_e4m3fn, 1)):
            yield Case(
                "decode_attention",
                f"{rows} at {context} {str(dtype)[6:14]}/{splits}",
                rows * context * 2 * KV_HEADS * DIM * size,
                lambda rows=rows, context=context, splits=splits, dtype=dtype: attention(rows, context, splits, dtype),
            )


def prompt_cases() -> Iterator[Case]:
    """Prefill attention by the kernel chosen for this GPU, bound by operations; the rival is torch's flash attention."""
    import torch

    from trireme.models.cuda.attention.registry import KERNELS, AttentionTrial, Need, choose_on_gpu

    need, tokens = Need(torch.bfloat16, DIM), 8192
    flash = next(kernel for kernel in KERNELS if kernel.name == "torch flash")

    def chosen(length: int) -> Callable[[], object]:
        attention = choose_on_gpu(need, HEADS, KV_HEADS).attention()
        return AttentionTrial(length, need, HEADS, KV_HEADS, tokens=tokens).launch(attention)

    def rival(length: int) -> Callable[[], object]:
        trial = AttentionTrial(length, need, HEADS, KV_HEADS, tokens=tokens)
        return trial.launch(trial.attention("fresh", flash.load()))

    for length in (128, 1024, tokens):
        yield Case(
            "prompt_attention",
            f"{tokens // length} x {length}",
            tokens * DIM * 2 * (2 * HEADS + 2 * KV_HEADS),
            lambda length=length: chosen(length),
            lambda length=length: rival(length),
            2.0 * HEADS * DIM * tokens * length,
        )


def choose_splits(rows: int, context: int) -> int:
    """Splits of a context: enough for four CTAs on every multiprocessor, none shorter than 64 tokens."""
    import torch

    wanted = 4 * torch.cuda.get_device_properties(0).multi_processor_count / (rows * KV_HEADS)
    return max(1, min(int(wanted), context // 64, 32))


ROWS_OF = {
    **{
        "linear fp8": (1, 8, 16, 32, 128),
        "linear q4_k": (1, 2, 4, 5, 8, 16, 32),
        "linear int8": (1, 8, 16, 32, 64, 128, 2048),
    },
    **dict.fromkeys(("linear q5_k", "linear q6_k", "linear q8_0"), (1, 2, 4)),
}


def product_cases() -> Iterator[Case]:
    """GEMMs with small M and bfloat16, float8, int8, grouped and GGUF weights; the rival is cuBLAS in bfloat16."""
    import torch

    from trireme.models.cuda import ops
    from trireme.models.cuda.layers.int8_linear import Int8Linear
    from trireme.models.cuda.layers.linear import Fp8Linear

    def dense(rows: int, n: int, k: int) -> Callable[[], object]:
        x, weight, out = random(rows, k), random(n, k), random(rows, n)
        return lambda: ops.skinny_linear(x, weight, out)

    def cublas(rows: int, n: int, k: int) -> Callable[[], object]:
        x, weight, out = random(rows, k), random(n, k).T, random(rows, n)
        return lambda: torch.mm(x, weight, out=out)

    def narrow(rows: int, n: int, k: int) -> Callable[[], object]:
        linear = Fp8Linear(random(n, k).to(torch.float8_e4m3fn), torch.ones(n, device="cuda"), None)
        x, out = random(rows, k), random(rows, n)
        return lambda: linear(x, out)

    def int8(rows: int, n: int, k: int) -> Callable[[], object]:
        """Inputs already quantized by the preceding norm."""
        weight, x = (torch.randint(-127, 128, (size, k), device="cuda", dtype=torch.int8) for size in (n, rows))
        linear = Int8Linear(weight, torch.ones(n, device="cuda"), None)
        scale, out = torch.ones(rows, device="cuda"), random(rows, n)
        return lambda: linear.forward_quantized(x, scale, out)

    def of_blocks(form: str, rows: int, n: int, k: int) -> Callable[[], object]:
        size = (n, k // ops.BLOCK_VALUES * ops.BLOCK_BYTES[form])
        weight = torch.randint(0, 60, size, device="cuda", dtype=torch.uint8)
        x, out = random(rows, k), random(rows, n)
        return lambda: ops.block_linear(x, weight, out, form=form)

    def q4_k(rows: int, n: int, k: int) -> Callable[[], object]:
        size = (n, k // ops.Q4_K_VALUES * ops.Q4_K_BYTES)
        weight = torch.randint(0, 60, size, device="cuda", dtype=torch.uint8)
        x, out = random(rows, k), random(rows, n)
        return lambda: ops.skinny_linear(x, weight, out)

    def codes(rows: int, n: int, k: int) -> Callable[[], object]:
        weight = torch.randint(0, 256, (n, k // 2), device="cuda", dtype=torch.uint8)
        groups = torch.full(
            (k // 128, n), 8 << 16 | 0x2400, device="cuda", dtype=torch.int32
        )  # zeros of 8, scales of 1/64
        x, out = random(rows, k), random(rows, n)
        return lambda: ops.skinny_w4(x, weight, groups, out)

    def float8_blocks(rows: int, n: int, k: int) -> Callable[[], object]:
        weight, groups = random(n, k).to(torch.float8_e4m3fn), torch.ones(k // 128, n, device="cuda")
        x, out = random(rows, k), random(rows, n)
        return lambda: ops.skinny_fp8_blocks(x, weight, groups, out)

    kinds: dict[str, tuple[float, Callable[[int, int, int], Callable[[], object]]]] = {
        "linear bf16": (2.0, dense),
        "linear fp8": (1.0, narrow),
        "linear int8": (1.0, int8),
        "linear q4_k": (ops.Q4_K_BYTES / ops.Q4_K_VALUES, q4_k),
        **{
            f"linear {form}": (ops.BLOCK_BYTES[form] / ops.BLOCK_VALUES, partial(of_blocks, form))
            for form in ("q5_k", "q6_k", "q8_0")
        },
        "linear w4_128": (1 / 2 + 4 / 128, codes),
        "linear fp8 blocks": (1 + 4 / 128, float8_blocks),
    }
    for n, k in ((WIDTH_QKV, HIDDEN), (HIDDEN, HIDDEN), (2 * FFN, HIDDEN), (HIDDEN, FFN), (VOCAB, HIDDEN)):
        for name, (size, make) in kinds.items():
            for rows in ROWS_OF.get(name, (1, 8, 16, 32)):
                arguments = (rows, n, k)
                yield Case(
                    name,
                    f"{rows} x {n}x{k}",
                    n * k * size + rows * (n + k) * 2,
                    lambda make=make, arguments=arguments: make(*arguments),
                    lambda arguments=arguments: cublas(*arguments),
                    2.0 * rows * n * k,
                )


def sampling_cases() -> Iterator[Case]:
    """Sampling from the logits of a batch; the floor is reading them once."""
    import numpy as np
    import torch

    from trireme.models.cuda import ops

    words = ops.touched_words(VOCAB)
    records = torch.zeros(256, words + VOCAB, device="cuda", dtype=torch.int32)
    records[:, :words:4] = records[:, words::128] = 1  # every 128th token was output once

    def sample(rows: int, greedy: bool, top_k: int, top_p: float, rules: bool, logprobs: int) -> Callable[[], object]:
        jobs = np.zeros(rows, ops.JOB)
        if rules:
            jobs["record"] = [record.data_ptr() for record in records[:rows]]
            jobs["repetition_penalty"], jobs["presence_penalty"] = 1.2, 0.5
        jobs["num_logprobs"] = logprobs
        jobs["temperature"], jobs["top_p"], jobs["min_depth"] = 1.0, top_p, -math.inf
        jobs["top_k"], jobs["is_greedy"] = top_k, greedy
        on_card = torch.from_numpy(jobs.view(np.uint8)).cuda()
        logits, at = random(rows, VOCAB), torch.arange(rows, device="cuda", dtype=torch.int32)
        tokens = torch.empty_like(at)
        beside = torch.empty(rows, ops.LOGPROB_WORDS, device="cuda", dtype=torch.int32)
        return lambda: ops.sample_rows(logits, on_card, at, tokens, logprobs=beside)

    kinds = {
        "greedy": (True, 0, 1.0, False, 0),
        "plain": (False, 0, 1.0, False, 0),
        "k50 p0.9": (False, 50, 0.9, False, 0),
        "penalties": (True, 0, 1.0, True, 0),
        "5 logprobs": (True, 0, 1.0, False, 6),
    }
    for rows in (1, 32, 256):
        for name, kind in kinds.items():
            arguments = (rows, *kind)
            yield Case("sample_rows", f"{rows} {name}", rows * VOCAB * 2, lambda a=arguments: sample(*a))


def time_ops(report: Report, ceilings: Ceilings) -> None:
    report.say("op                 shape                          time                       over    rival us")
    for cases in (row_cases, attention_cases, prompt_cases, product_cases, sampling_cases):
        for case in cases():
            report.add("ops", time_case(case, ceilings))


# ---------------------------------------------------------------- a decode step


def make_model() -> Any:
    """The CUDA decoder in Llama-3.1-8B's shape, with random weights generated on the GPU."""
    import torch

    from trireme.model.reader import arch_from_config
    from trireme.models.cuda.decoder import CudaModel
    from trireme.models.cuda.weights.sources import NoiseWeights
    from trireme.models.weights.dummy import DummySource

    where = Path("llama-3.1-8b")
    arch = arch_from_config(LLAMA_8B, {}, where)
    weights = NoiseWeights(DummySource(arch, (), where), torch.bfloat16, torch.device("cuda"))
    return CudaModel(arch, weights, torch.bfloat16, max_len=16384, progress=lambda *_: None)


def time_step(model: Any, rows: int, context: int, ceilings: Ceilings) -> Timing:
    """One decode step of a batch, from token ids to sampled ids, captured in a graph."""
    import torch

    from trireme.models.cuda.decoder import CudaBatch

    blocks = context // BLOCK_SIZE
    splits = choose_splits(rows, context)
    kv = model.allocate_kv(rows * blocks, BLOCK_SIZE)
    table = torch.randperm(rows * blocks, device="cuda").view(rows, blocks).int()
    last = torch.full((rows,), context - 1, device="cuda", dtype=torch.int32)
    batch = CudaBatch(
        token_ids=torch.randint(0, VOCAB, (rows,), device="cuda", dtype=torch.int32),
        positions=last,
        slots=table[:, -1] * BLOCK_SIZE + BLOCK_SIZE - 1,
        context_len=last + 1,
        block_table=table,
        logits_index=None,
        num_decodes=rows,
        splits=splits,
    )
    scratch = torch.empty(max(1, model.scratch_floats(rows, splits)), device="cuda")
    with torch.inference_mode():
        us = time_launches([lambda: torch.argmax(model.run(batch, kv, scratch), -1)])
    kv_bytes = rows * context * 2 * KV_HEADS * DIM * 2 * LAYERS
    read = model.weight_bytes - VOCAB * HIDDEN * 2  # of the embedding, single rows only
    operations = 2.0 * rows * read / 2
    return Timing("decode step", f"{rows} at {context}/{splits}", us, floor_us(ceilings, read + kv_bytes, operations))


def time_steps(report: Report, ceilings: Ceilings, batches: Sequence[int]) -> None:
    """Times the decode steps of STEPS, or of those whose batch size is in `batches`."""
    import torch

    started = time.monotonic()
    model = make_model()
    model.reserve(256)
    report.say(f"a model of {model.weight_bytes / 1e9:.2f} GB in {time.monotonic() - started:.1f} s")
    for rows, context in STEPS:
        if not batches or rows in batches:
            report.add("step", time_step(model, rows, context, ceilings))
            torch.cuda.empty_cache()


# ---------------------------------------------------------------- main


def parse(words: Sequence[str]) -> argparse.Namespace:
    """Arguments; those after a bare -- are for pytest."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", nargs="?", default="all", choices=("build", "test", "ops", "step", "all"))
    parser.add_argument("--json", type=Path, help="file for all numbers")
    parser.add_argument("--batches", default="", help="rows of the steps to time, as in 1,32; all by default")
    own, pytest = list(words), []
    if "--" in own:
        at = own.index("--")
        own, pytest = own[:at], own[at + 1 :]
    arguments = parser.parse_args(own)
    arguments.pytest = pytest
    return arguments


def what_is_missing() -> str:
    """Why nothing can be checked here, or ""."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} sees no NVIDIA GPU"
    return ""


def main() -> int:
    """Runs the parts that were asked for; returns 0, 1 after a failure, or NO_CARD where nothing can run."""
    arguments = parse(sys.argv[1:])
    report = Report()
    missing = what_is_missing()
    if missing:
        report.say(f"skipped: {missing}")
        return NO_CARD
    parts = ("build", "test", "ops", "step") if arguments.part == "all" else (arguments.part,)
    is_sound = True
    if "build" in parts:
        is_sound = run_command(report, "build", [sys.executable, "setup.py", "-q", "build_ext", "--inplace", "-j3"])
    if "test" in parts and is_sound:
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "tests/gpu", *arguments.pytest]
        is_sound = run_command(report, "test", command)
    if is_sound and {"ops", "step"} & set(parts):
        time_parts(report, parts, [int(rows) for rows in arguments.batches.split(",") if rows])
    if arguments.json:
        arguments.json.write_text(json.dumps(report.facts, indent=1) + "\n")
    return 0 if is_sound else 1


def time_parts(report: Report, parts: Sequence[str], batches: Sequence[int]) -> None:
    """Measures the ceilings, then times ops and steps."""
    import torch

    torch.manual_seed(0)
    ceilings = measure_ceilings()
    card = torch.cuda.get_device_name()
    report.facts |= {"card": card, "torch": torch.__version__, "ceilings": asdict(ceilings)}
    tera = ceilings.bytes_per_s / 1e12
    report.say(
        f"{card}, torch {torch.__version__}: {tera:.2f} TB/s, {ceilings.ops_per_s / 1e12:.0f} bf16 TFLOP/s measured"
    )
    if "ops" in parts:
        time_ops(report, ceilings)
    if "step" in parts:
        time_steps(report, ceilings, batches)


if __name__ == "__main__":
    sys.exit(main())
