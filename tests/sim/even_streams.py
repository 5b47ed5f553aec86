"""One engine core in virtual time under random loads: are step times kept within their bounds, and at what price?

`python -m tests.sim.even_streams [LOADS]` runs the loads, and prints goodput against fixed token budgets; it exits with 1 when a
promise is not kept. The core is the real one;
its steps take what StepCosts say, with noise, so the model of step times has to learn them.
"""

from __future__ import annotations

import random
import sys
from collections import defaultdict
from math import inf
from typing import NamedTuple

import msgspec
import numpy as np

from trireme.engine_core.bench import answer
from trireme.engine_core.core import EngineCore
from trireme.engine_core.scheduling.chunk_budget import LEAST_TOKENS
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.machine.step_sizes import StepSizes, padded_decodes
from trireme.metrics import percentile
from trireme.params import RowParams
from trireme.step_time import StepCosts, StepShape
from trireme.transport.wire.messages import StepPlan, Submit

BLOCK, VOCAB = 16, 1000
CPU = StepCosts(step_s=0.008, token_s=0.0006, context_s=2e-7, pair_s=2.5e-7)
GPU = StepCosts(step_s=0.004, token_s=0.00003, context_s=3e-8, pair_s=1.5e-9)


class Visit(NamedTuple):
    """One request: when it comes, and its lengths."""

    at: float
    num_prompt: int
    num_output: int
    itl_target: float = 0.0  # 0: the engine's


class Outcome(NamedTuple):
    """What one request got, in seconds."""

    first_s: float
    gaps: list[float]

    def is_good(self, ttft: float, itl: float) -> bool:
        return self.first_s <= ttft and (not self.gaps or percentile(self.gaps, 99) <= itl)


class Run(NamedTuple):
    """`kept` of the `bounded` steps in which some choice could keep the bound."""

    outcomes: list[Outcome]
    end_s: float
    bounded: int
    kept: int
    errors: tuple[float, float]
    num_tokens: int

    def goodput(self, ttft: float, itl: float) -> float:
        return sum(outcome.is_good(ttft, itl) for outcome in self.outcomes) / self.end_s


def limits(most_tokens: int, itl_target: float = inf, ttft_target: float = 0.0, num_seqs: int = 64) -> Limits:
    return Limits(
        max_len=16384,
        vocab_size=VOCAB,
        num_blocks=64 * 1024,
        block_size=BLOCK,
        max_num_seqs=num_seqs,
        max_num_tokens=most_tokens,
        chunk=most_tokens,
        max_waiting=10_000,
        max_waiting_tokens=1 << 30,
        itl_target=itl_target,
        ttft_target=ttft_target,
    )


class Engine:
    """A core and its worker on a virtual clock; two steps may be in flight, and the worker runs one after the other."""

    def __init__(self, bounds: Limits, costs: StepCosts, noise: float, seed: int, policy: str = "fcfs") -> None:
        self.core = EngineCore(bounds, depth=2, ahead=True, policy=policy)
        self.sizes = StepSizes(bounds.padded_decodes)
        self.costs = costs
        self.noise = noise
        self.dice = random.Random(seed)
        self.now = 0.0
        self.free_at = 0.0
        self.slowdown = 1.0
        self.bounded = self.kept = 0
        self.steps: list[tuple[float, StepShape, float, StepPlan]] = []  # end, shape, seconds, plan

    def plan(self) -> None:
        scheduler = self.core.scheduler
        while (plan := self.core.next_plan(self.now)) is not None:
            pending = scheduler.in_flight[-1]
            shape = pending.shape()
            seconds = self.seconds(shape) * self.slowdown * max(0.5, self.dice.gauss(1.0, self.noise))
            self.free_at = max(self.free_at, self.now) + seconds
            self.steps.append((self.free_at, shape, seconds, plan))
            if shape.rows and shape.prompt and pending.bound_s < inf:
                self._judge(shape, seconds, min(chunk.num_computed for chunk in pending.chunks))

    def seconds(self, shape: StepShape) -> float:
        """Of a step, padded to a captured size if the engine captures any."""
        if shape.prompt:
            shape = shape._replace(prompt=self.sizes.computed(shape.rows, shape.prompt) - shape.rows)
        return self.costs.seconds(shape)

    def finish(self) -> None:
        """Answers the oldest step."""
        self.core.on_result(answer(self.steps.pop(0)[3]), self.now)

    def _judge(self, shape: StepShape, seconds: float, start: int) -> None:
        """Counts the step if some choice of prompt tokens could keep the bound, whatever the noise."""
        decode = StepShape(shape.rows, shape.context)
        budget = self.core.scheduler.budget
        bound_s = budget.late * max(budget.target_s, self.core.limits.decode_steps * self.seconds(decode))
        if self.seconds(decode.plus(LEAST_TOKENS, start)) * (1 + 3 * self.noise) <= bound_s:
            self.bounded += 1
            self.kept += seconds <= bound_s * max(1.0, self.slowdown)


def run(
    visits: list[Visit], bounds: Limits, costs: StepCosts, *, noise: float = 0.03, seed: int = 0, policy: str = "fcfs"
) -> Run:
    """Serves all visits; every stream must end with all its tokens."""
    engine = Engine(bounds, costs, noise, seed, policy)
    core, dice = engine.core, np.random.default_rng(seed)
    todo = sorted(enumerate(visits), key=lambda item: item[1].at)[::-1]
    times: dict[int, list[float]] = defaultdict(list)
    ended: set[int] = set()
    while todo or core.requests:
        while todo and todo[-1][1].at <= engine.now:
            rid, visit = todo.pop()
            prompt = dice.integers(0, VOCAB, visit.num_prompt, dtype=np.int32)
            params = RowParams(visit.num_output, eos_token_ids=())
            core.submit("front", Submit(rid, prompt, params, itl_target_s=visit.itl_target), engine.now)
        engine.plan()
        engine.now = min([todo[-1][1].at] if todo else [inf], [engine.steps[0][0]] if engine.steps else [inf])[0]
        assert engine.now < inf, "nothing runs, and nothing comes"
        while engine.steps and engine.steps[0][0] <= engine.now:
            engine.finish()
            for outputs in core.take_outputs().values():
                for rid in np.frombuffer(outputs.rids, np.int64).tolist():
                    times[rid].append(engine.now)
                ended |= {end.rid for end in outputs.ends if end.reason == "length"}
    core.audit()
    assert len(ended) == len(visits), "a request did not end with all its tokens"
    outcomes = []
    for rid, visit in enumerate(visits):
        assert len(times[rid]) == visit.num_output
        gaps = [b - a for a, b in zip(times[rid], times[rid][1:], strict=False)]
        outcomes.append(Outcome(times[rid][0] - visit.at, gaps))
    return Run(
        outcomes,
        engine.now,
        engine.bounded,
        engine.kept,
        core.scheduler.budget.times.errors(),
        sum(visit.num_prompt + visit.num_output for visit in visits),
    )


# ---------------------------------------------------------------- random loads


def draw(seed: int) -> tuple[list[Visit], Limits, StepCosts]:
    """A load, a target and a machine."""
    rng = random.Random(seed)
    costs = rng.choice([CPU, GPU])
    speed = costs.token_s
    longest = rng.choice([64, 512, 2048, 8192])
    spread_s = rng.choice([0.0, 1.0, 4.0]) * speed * 5000
    visits = [
        Visit(
            rng.random() * spread_s,
            int(2 ** rng.uniform(0, np.log2(longest))),
            rng.randrange(1, 60),
            rng.choice([0.0, 0.0, 0.0, 2 * costs.step_s, inf]),
        )
        for _ in range(rng.choice([2, 6, 12, 20]))
    ]
    target = costs.step_s * rng.choice([1.5, 2.5, 5.0, 10.0])
    most = rng.choice([256, 2048, 16384])
    bounds = limits(most, target, rng.choice([0.0, 0.0, 50 * target]), rng.choice([4, 16, 64]))
    if costs is GPU and rng.random() < 0.7:
        bounds = msgspec.structs.replace(bounds, padded_decodes=padded_decodes(bounds.max_num_seqs))
    return visits, bounds, costs


def check_random_loads(count: int, first: int = 0) -> tuple[int, int]:
    """Steps in which the bound could be kept, and was. Raises AssertionError for a request that is not served in full."""
    bounded = kept = 0
    for seed in range(first, first + count):
        visits, bounds, costs = draw(seed)
        found = run(visits, bounds, costs, seed=seed)
        bounded, kept = bounded + found.bounded, kept + found.kept
    return bounded, kept


# ---------------------------------------------------------------- goodput against fixed budgets

FIXED = (64, 128, 256, 512, 1024, 2048)


def trace(kind: str, seed: int, costs: StepCosts) -> list[Visit]:
    """Poisson arrivals at about 0.6 of what the engine can serve: short prompts with long answers (chat), long prompts with short
    ones (documents), or both (mixed)."""
    rng = random.Random(f"{kind}-{seed}")
    visits, at = [], 0.0
    for _ in range(150):
        is_long = kind == "documents" or (kind == "mixed" and rng.random() < 0.12)
        prompt = rng.randrange(2000, 6000) if is_long else rng.randrange(16, 256)
        output = rng.randrange(16, 64) if is_long else rng.randrange(64, 256)
        visits.append(Visit(at, prompt, output))
        prefill_s = prompt * costs.token_s + prompt * prompt / 2 * costs.pair_s
        decode_s = output * (costs.step_s / 8 + costs.token_s + costs.context_s * prompt)
        at += rng.expovariate(1.0) * (prefill_s + decode_s) / 0.6
    return visits


class Machine(NamedTuple):
    """Costs, and what its users expect."""

    name: str
    costs: StepCosts
    ttft: float
    itl: float


MACHINES = (Machine("cpu", CPU, 4.0, 0.060), Machine("gpu", GPU, 0.2, 0.012))


def table(machine: Machine, kind: str, seeds: int = 2) -> dict[str, float]:
    """Goodput (requests a second within both targets) of a trace, by token budget of a step; `even`: with a target."""
    settings = {str(most): limits(most, num_seqs=min(64, most)) for most in FIXED}
    settings["even"] = limits(max(FIXED), machine.itl)
    found = {}
    for name, bounds in settings.items():
        runs = [run(trace(kind, seed, machine.costs), bounds, machine.costs, seed=seed) for seed in range(seeds)]
        found[name] = sum(one.goodput(machine.ttft, machine.itl) for one in runs) / seeds
    return found


def main(count: int) -> int:
    """Prints both; 1 if a bound or a goodput is worse than promised."""
    bounded, kept = check_random_loads(count)
    print(f"{count} loads: {kept} of {bounded} steps kept their bound where one could ({kept / max(bounded, 1):.2%})")
    is_good = kept >= 0.99 * bounded
    for machine in MACHINES:
        print(
            f"{machine.name}: requests/s with first tokens in {machine.ttft:g} s, gaps (p99) in {machine.itl * 1e3:g} ms"
        )
        for kind in ("chat", "documents", "mixed"):
            found = table(machine, kind)
            print(f"  {kind:10}", " ".join(f"{budget}: {value:.3g}" for budget, value in found.items()), flush=True)
            best = max(found[str(most)] for most in FIXED)
            is_good &= found["even"] > best if kind == "mixed" else found["even"] >= 0.97 * best
    return 0 if is_good else 1


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]) if len(sys.argv) > 1 else 300))
