"""GPU benchmarks through the engine's own processes, in a model's shape with dummy weights: decode steps by batch size,
prefill, long contexts, many requests at once, HTTP clients, starts. No network and no model file. `--tp 2` or `--pp 2` spread the
model over GPUs.

    python scripts/gpu_figures.py --shape llama-8b --figures step:1,step:32,step:256,requests:512x1024x128,prefill:8x8192
    python scripts/gpu_figures.py --quantize fp8 --kv-dtype fp8 --figures step:1,step:16x8192
    python scripts/gpu_figures.py --figures start,http:1,http:32,http:128

A decode step is (T(n out) - T(1 out)) / (n - 1) over fresh random prompts, so prefill is left out. Greedy, end-of-text ignored.
`start` and `http` are `trireme bench startup` and `bench serve`; their servers have the GPU to themselves, so they run first. A
start is cold when the caches of compiled kernels are empty; the page cache is left as it is.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trireme import LLM, SamplingParams
from trireme.launch.bench.samples import WORDS

COMMON = {"hidden_act": "silu", "head_dim": 128, "torch_dtype": "bfloat16", "bos_token_id": 0, "eos_token_id": 0}
SHAPES: dict[str, dict[str, Any]] = {
    "llama-8b": {
        **COMMON,
        **{"model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32},
        **{"num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 131072, "rope_theta": 500000.0, "tie_word_embeddings": False},
    },
    "qwen3-0.6b": {
        **COMMON,
        **{"model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 28},
        **{"num_attention_heads": 16, "num_key_value_heads": 8, "vocab_size": 151936, "rms_norm_eps": 1e-6},
        **{"max_position_embeddings": 40960, "rope_theta": 1000000.0, "tie_word_embeddings": True},
    },
    "tiny": {
        **COMMON,
        **{"model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320, "rms_norm_eps": 1e-5},
        **{"max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": False},
    },
}
ROOT = Path(__file__).resolve().parent.parent
SHORT_PROMPT, STEPS = 128, 256
NUM_IDS = 256  # distinct token ids in prompts
KERNEL_CACHES = ("TRITON_CACHE_DIR", "CUDA_CACHE_PATH")


def write_shape(name: str, directory: Path) -> None:
    """Writes config.json, and a tokenizer of matching vocabulary: words that HTTP clients send, and others that the model may
    generate."""
    (directory / "config.json").write_text(json.dumps(SHAPES[name]))
    words = list(dict.fromkeys(WORDS))
    words += [f"w{i}" for i in range(len(words) + 1, SHAPES[name]["vocab_size"])]
    vocab = {"<end>": 0, **{word: i for i, word in enumerate(words, 1)}}
    model = {"type": "WordLevel", "vocab": vocab, "unk_token": "<end>"}
    parts = dict.fromkeys(("truncation", "padding", "normalizer", "post_processor", "decoder"))
    splits = {"type": "Whitespace"}
    tokenizer = {"version": "1.0", "added_tokens": [], **parts, "pre_tokenizer": splits, "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))


class Bench:
    """One engine and its measurements; every call uses prompts that no cache contains."""

    def __init__(self, llm: LLM, steps: int) -> None:
        self._llm, self._steps = llm, steps
        self._rng = random.Random(0)

    def seconds(self, count: int, num_in: int, num_out: int) -> float:
        """Wall time in seconds of `count` simultaneous requests."""
        prompts = [[self._rng.randrange(1, NUM_IDS) for _ in range(num_in)] for _ in range(count)]
        params = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
        begun = time.perf_counter()
        self._llm.generate(prompts, params, progress=False)
        return time.perf_counter() - begun

    def step(self, batch: int, num_in: int = SHORT_PROMPT) -> dict[str, float]:
        first = min(self.seconds(batch, num_in, 1) for _ in range(2))
        whole = min(self.seconds(batch, num_in, self._steps) for _ in range(2))
        figures = {"step_ms": (whole - first) / (self._steps - 1) * 1e3, "first_ms": first * 1e3}
        return {**figures, "output_tok_s": batch * self._steps / whole}

    def prefill(self, count: int, num_in: int) -> dict[str, float]:
        return {"prefill_tok_s": count * num_in / self.seconds(count, num_in, 1)}

    def requests(self, count: int, num_in: int, num_out: int) -> dict[str, float]:
        took = self.seconds(count, num_in, num_out)
        return {"total_tok_s": count * (num_in + num_out) / took, "output_tok_s": count * num_out / took}

    def figure(self, text: str) -> dict[str, float]:
        """`step:BATCH`, `step:BATCHxIN`, `prefill:COUNTxIN`, `requests:COUNTxINxOUT`."""
        kind, _, sizes = text.partition(":")
        measure = {"step": self.step, "prefill": self.prefill, "requests": self.requests}[kind]
        return measure(*map(int, sizes.split("x")))  # type: ignore[operator,no-any-return]


class Servers:
    """Separate servers, each started by a `trireme` command and stopped with it."""

    def __init__(self, folder: str, settings: dict[str, Any]) -> None:
        self._folder = folder
        self._flags: list[str] = []
        for name, value in settings.items():
            if value is not None and value is not False:
                self._flags += ["--" + name.replace("_", "-"), *([] if value is True else [str(value)])]

    def starts(self) -> list[tuple[str, dict[str, float]]]:
        """From launch to first token, with phases: with empty kernel caches, then again."""
        with tempfile.TemporaryDirectory(prefix="trireme-caches-") as caches:
            places = {name: str(Path(caches) / name) for name in KERNEL_CACHES}
            rows = self._run(["bench", "startup", "--repeats", "2"], places)
        return list(zip(("start cold", "start warm"), rows, strict=True))

    def http(self, loads: list[tuple[int, int, int]]) -> Iterator[tuple[str, dict[str, float]]]:
        """(clients, tokens in, tokens out) of each load; one server for consecutive loads with the same lengths."""
        while loads:
            _, num_in, num_out = loads[0]
            alike = [load for load in loads if load[1:] == loads[0][1:]]
            loads = [load for load in loads if load[1:] != loads[0][1:]]
            sizes = ["--input-len", str(num_in), "--output-len", str(num_out)]
            clients = ",".join(str(load[0]) for load in alike)
            for load, row in zip(
                alike, self._run(["bench", "serve", "--concurrency", clients, *sizes], {}), strict=True
            ):
                figures = {name: row[name] for name in ("output_tok_s", "ttft_p50_ms", "ttft_p99_ms", "errors")}
                yield f"http:{load[0]}x{num_in}x{num_out}", {**figures, "tpot_p50_ms": 1e3 / row["stream_tok_s"]}

    def _run(self, words: list[str], environment: dict[str, str]) -> list[dict[str, float]]:
        command = [sys.executable, "-m", "trireme.launch.cli", *words, "--json", *self._flags, self._folder]
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, stdout=subprocess.PIPE, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(words)} ended with {done.returncode}")
        return [{k: v for k, v in row.items() if isinstance(v, float)} for row in json.loads(done.stdout)["rows"]]


def main(words: list[str] | None = None) -> list[dict[str, Any]]:
    """Prints and returns the figures, one per line."""
    parser = argparse.ArgumentParser(description="figures of a GPU over dummy weights")
    parser.add_argument("--shape", choices=SHAPES, default="llama-8b")
    parser.add_argument("--figures", default="step:1,step:8,step:32,step:64,step:128,step:256")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--max-len", type=int, default=16384)
    parser.add_argument("--quantize", help="as trireme serve has it")
    parser.add_argument("--kv-dtype", default="auto")
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--pp", type=int, default=1)
    parser.add_argument("--share-gpus", action="store_true")
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-num-tokens", type=int)
    asked = parser.parse_args(words)
    shape = " ".join([asked.shape, *(text for text in (asked.quantize, asked.kv_dtype) if text not in (None, "auto"))])
    figures = asked.figures.split(",")
    loads = [_load(text, asked.steps) for text in figures if text.startswith("http:")]
    of_engine = [text for text in figures if text != "start" and not text.startswith("http:")]
    rows: list[dict[str, Any]] = []

    def tell(figure: str, found: dict[str, float]) -> None:
        rows.append({"shape": shape, "figure": figure, **found})
        print("  ".join(f"{k} {v:.3f}" if isinstance(v, float) else v for k, v in rows[-1].items()), flush=True)

    with tempfile.TemporaryDirectory(prefix="trireme-shape-") as folder:
        write_shape(asked.shape, Path(folder))
        settings = {"device": asked.device, "load_format": "dummy", "max_len": asked.max_len}
        settings |= {"quantize": asked.quantize, "kv_dtype": asked.kv_dtype}
        settings |= {"tp": asked.tp, "pp": asked.pp, "share_gpus": asked.share_gpus}
        settings |= {"max_num_seqs": asked.max_num_seqs, "max_num_tokens": asked.max_num_tokens}
        servers = Servers(folder, settings)
        for figure, found in servers.starts() if "start" in figures else ():
            tell(figure, found)
        for figure, found in servers.http(loads):
            tell(figure, found)
        if not of_engine:
            return rows
        begun = time.perf_counter()
        settings |= {"max_waiting": 4096, "max_waiting_tokens": 1 << 24, "log_level": "warning"}
        with LLM(folder, **settings) as llm:
            spread = f" tp {asked.tp} pp {asked.pp}" if asked.tp * asked.pp > 1 else ""
            print(f"{shape}{spread} started in {time.perf_counter() - begun:.1f} s", flush=True)
            bench = Bench(llm, asked.steps)
            bench.seconds(4, 16, 8)  # warm-up
            for text in of_engine:
                tell(text, bench.figure(text))
    return rows


def _load(text: str, num_out: int) -> tuple[int, int, int]:
    """`http:CLIENTS`, `http:CLIENTSxINxOUT`."""
    clients, *sizes = map(int, text.partition(":")[2].split("x"))
    return clients, *(sizes or [SHORT_PROMPT, num_out])  # type: ignore[return-value]


if __name__ == "__main__":
    main()
