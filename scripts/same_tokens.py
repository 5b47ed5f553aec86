"""Does one request get the same tokens however it is served? Greedy texts of many prompts: alone, in batches, in chunks, with
other thread counts, caches and kernels; prints a table and, where texts diverge, the margin of the choice.

  python -m scripts.same_tokens [--model smollm2] [--prompts FILE.json] [--num-prompts 50] [--output-len 32] [--only NAME,NAME]

All but the kernels of another instruction set must give equal texts and equal log-probabilities, bit for bit; those may diverge
at near ties (see TIE). The status is 1 otherwise.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trireme import LLM, SamplingParams
from trireme.models.native import load_native
from trireme.outputs import CompletionOutput

# Instruction sets round sums differently, so some activations quantize to another int8 value, and after some
# layers most do. On 292 positions of SmolLM2 logits of the portable and the AVX2 kernels differ by 0.106 rms (nats, apart from a
# common shift); a choice with a margin below four times that counts as a near tie.
TIE = 4 * 0.106

OPENINGS = (
    "The capital of France is",
    "Once upon a time, in a small village by the sea,",
    "def fibonacci(n):\n    ",
    "The three laws of thermodynamics are",
    "In 1969, Neil Armstrong",
    "Dear Sir or Madam,\n\nI am writing to",
    "1, 2, 3, 4, 5, 6,",
    "# Installation\n\nTo install the package, run",
    "What is the difference between a lake and a pond?",
    "Write a haiku about the sea.",
    "Explain photosynthesis to a child.",
    "List three uses of a paper clip.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "Why is the sky blue?",
    "How do I boil an egg?",
    "SELECT name, age FROM people WHERE",
    "To be, or not to be,",
    "The quick brown fox",
    "import numpy as np\n\ndef softmax(x):",
    "Our company was founded in 1987 by",
    "The best way to learn a language is",
    "Bees make honey because",
    "A train leaves the station at noon.",
    "She opened the old wooden door and saw",
)
FILLER = (
    "The ferry crosses twice a day, except when the wind is from the west. Its captain keeps a book of every crossing: the hour, "
    "the tide, the number of people and animals on board, and whatever he finds worth a line. "
)


class Variant(NamedTuple):
    """One way to serve. `settings` go to LLM; `isa` is an instruction set, None for the default; `rounds` repeats the whole
    run."""

    name: str
    settings: dict[str, Any]
    isa: str | None = None
    rounds: int = 1

    @property
    def is_exact(self) -> bool:
        return self.isa is None


BATCH = {"max_num_seqs": 8, "prefix_cache": False}
ALONE = Variant("alone", {"max_num_seqs": 1, "prefix_cache": False})
VARIANTS = (
    *(Variant(f"batch {n}", {"max_num_seqs": n, "prefix_cache": False}) for n in (2, 8, 64)),
    *(Variant(f"chunk {n}", {**BATCH, "chunk": n}) for n in (16, 64, 512)),
    *(Variant(f"threads {n}", {**BATCH, "threads": n}) for n in (1, 2)),
    Variant("prefix cache", {**BATCH, "prefix_cache": True}, rounds=2),
    Variant("steps one by one", {**BATCH, "async_steps": False}),
    Variant("block 32", {**BATCH, "block_size": 32}),
    # Far slower: steps are kept short, or they would count as stuck.
    Variant("portable kernels", {**BATCH, "max_num_tokens": 64, "step_timeout": 600}, isa="portable"),
)


class Difference(NamedTuple):
    """First divergence of a text from the reference: prompt, position, and the reference's margin there in nats."""

    prompt: int
    place: int
    margin: float


class Comparison(NamedTuple):
    """A variant against the reference. `num_bits` counts texts whose log-probabilities are bit-identical too."""

    variant: Variant
    num_texts: int
    num_bits: int
    differences: list[Difference]
    seconds: float

    @property
    def is_good(self) -> bool:
        if self.variant.is_exact:
            return not self.differences and self.num_bits == self.num_texts
        return all(difference.margin < TIE for difference in self.differences)


def own_prompts() -> list[str]:
    """50 texts: each opening alone, and after filler of up to some 500 tokens, so that chunks and batches are uneven."""
    return [text for i, opening in enumerate(OPENINGS) for text in (opening, FILLER * (1 + i % 11) + opening)]


def texts_in(document: Any) -> Iterator[str]:
    """Every string in a JSON document that is a list item or the value of `text` or `prompt`."""
    if isinstance(document, list):
        for item in document:
            yield from [item] if isinstance(item, str) else texts_in(item)
    elif isinstance(document, dict):
        for key, value in document.items():
            yield from [value] if isinstance(value, str) and key in ("text", "prompt") else texts_in(value)


def serve(model: str, variant: Variant, prompts: Sequence[str], output_len: int) -> list[CompletionOutput]:
    """The greedy answers of one engine, with the two likeliest tokens of each position; all rounds, in order."""
    native = load_native()
    usual = native.isa()
    native.set_isa(variant.isa or usual)
    params = SamplingParams(temperature=0, max_tokens=output_len, ignore_eos=True, logprobs=2)
    outputs = []
    try:
        with LLM(
            model,
            executor="inproc",
            max_len=2048,
            progress=False,
            max_waiting=1024,
            queue_timeout=0,
            **variant.settings,
        ) as llm:
            for _ in range(variant.rounds):
                outputs += [output.outputs[0] for output in llm.generate(list(prompts), params, progress=False)]
    finally:
        native.set_isa(usual)
    return outputs


def compare(variant: Variant, expected: Sequence[CompletionOutput], got: Sequence[CompletionOutput]) -> Comparison:
    """Compares answers with the reference; `got` may repeat the prompts several times."""
    differences, num_bits = [], 0
    for index, output in enumerate(got):
        wanted = expected[index % len(expected)]
        num_bits += output.logprobs == wanted.logprobs
        if output.token_ids != wanted.token_ids:
            pairs = zip(output.token_ids, wanted.token_ids, strict=True)
            place = next(i for i, (a, b) in enumerate(pairs) if a != b)
            differences.append(Difference(index % len(expected), place, margin_at(wanted, place)))
    return Comparison(variant, len(got), num_bits, differences, 0.0)


def margin_at(output: CompletionOutput, place: int) -> float:
    assert output.logprobs is not None
    top = output.logprobs[place].top
    return top[0][1] - top[1][1]


def run(model: str, variants: Sequence[Variant], prompts: Sequence[str], output_len: int) -> Iterator[Comparison]:
    """Serves the prompts one at a time, then as each variant says."""
    begun = time.perf_counter()
    expected = serve(model, ALONE, prompts, output_len)
    yield compare(ALONE, expected, expected)._replace(seconds=time.perf_counter() - begun)
    for variant in variants:
        begun = time.perf_counter()
        got = serve(model, variant, prompts, output_len)
        yield compare(variant, expected, got)._replace(seconds=time.perf_counter() - begun)


def row(comparison: Comparison) -> str:
    """One Markdown table row of a comparison."""
    different = len(comparison.differences)
    margins = ", ".join(f"{d.margin:.2g}" for d in sorted(comparison.differences, key=lambda d: d.margin))
    equal = comparison.num_texts - different
    cells = (
        comparison.variant.name,
        equal,
        different,
        comparison.num_bits,
        f"{comparison.seconds:.0f}",
        margins or "-",
    )
    return "| " + " | ".join(map(str, cells)) + " |"


def main(words: list[str]) -> int:
    """Compares the variants that the flags choose; exit status 1 unless all are as equal as they must be."""
    parser = argparse.ArgumentParser(prog="same_tokens", description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--prompts", type=Path, help="JSON with texts anywhere in it; default: 50 texts of its own")
    parser.add_argument("--num-prompts", type=int, default=50)
    parser.add_argument("--output-len", type=int, default=32)
    parser.add_argument("--only", default="", help="names of variants, with commas")
    given = parser.parse_args(words)
    texts = own_prompts() if given.prompts is None else list(texts_in(json.loads(given.prompts.read_text())))
    prompts = sorted(texts, key=len)[:: max(1, len(texts) // given.num_prompts)][: given.num_prompts]
    chosen = [v for v in VARIANTS if not given.only or v.name in given.only.split(",")]
    print(f"{len(prompts)} prompts, {given.output_len} tokens each, {given.model}, {load_native().isa()}", flush=True)
    print(
        "| served | equal texts | different | equal to the bit | s | margins where they part, nats |\n|---|---|---|---|---|---|"
    )
    is_good = True
    for comparison in run(given.model, chosen, prompts, given.output_len):
        print(row(comparison), flush=True)
        is_good &= comparison.is_good
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
