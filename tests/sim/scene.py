"""One seed as data: how large the deployment is, what is asked of it and when, and what goes wrong."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from math import inf

import msgspec
import numpy as np

from trireme.coordinator.router import POLICIES as BALANCES
from trireme.coordinator.simulation.cost_model import FAULT_TOKEN, FIRST_TOKEN, POISON_TOKEN
from trireme.coordinator.simulation.faults import Fault, draw_faults
from trireme.engine_core.scheduling.policies.base import POLICIES
from trireme.engine_core.scheduling.scheduler import Limits
from trireme.params import RowParams
from trireme.serving.engines.replay import Replay
from trireme.step_time import StepCosts

VOCAB = 64
EOS = 20
MAX_LEN = 40


@dataclass(eq=False)
class Ask:
    """One request: its choices, and how its reader behaves."""

    index: int
    at: float
    front: str
    replays: list[Replay]
    pin: int = -1
    is_bad: bool = False  # its prompt does not fit: to be refused
    is_faulty: bool = False  # fails in the model
    is_poison: bool = False  # kills each engine that runs it
    read_s: float = 0.0  # the reader is this slow after each batch
    leaves_after_s: float = 0.0  # the reader goes away
    total_s: float = 0.0  # the time it may take in all
    stops_at: dict[int, int] = field(default_factory=dict)  # choice -> tokens after which its stop string is found


@dataclass(eq=False)
class Scene:
    """Everything that a seed decides before the world begins."""

    seed: int
    engines: list[str]
    fronts: list[str]
    has_coordinator: bool
    balance: str
    policy: str
    depth: int
    ahead: bool
    limits: Limits
    costs: list[StepCosts]
    delays: tuple[float, float, float]  # usual, rare, share of rare ones
    twice: float
    most_unread: int
    step_timeout: float
    asks: list[Ask]
    faults: list[Fault]
    horizon_s: float
    only_coordinator: bool

    @property
    def steals_for(self) -> int:
        """Half of the worlds have work stealing."""
        return self.limits.max_num_seqs if self.seed % 2 else 0

    @property
    def routes_by_prefix(self) -> bool:
        return self.has_coordinator and self.limits.prefix_cache and self.balance.startswith("prefix")

    @property
    def is_tight(self) -> bool:
        """Requests may be refused for want of room."""
        return self.limits.max_waiting < 64 or self.limits.queue_timeout > 0 or self.limits.ttft_target > 0

    @property
    def has_poison(self) -> bool:
        return any(ask.is_poison for ask in self.asks)


def draw_scene(seed: int) -> Scene:
    rng = random.Random(seed)
    engines = [f"engine-{i}" for i in range(rng.choice([1, 2, 2, 3, 3, 4]))]
    fronts = [f"front-{i}" for i in range(rng.choice([1, 1, 2, 3]))]
    has_coordinator = len(engines) > 1
    only_coordinator = has_coordinator and rng.random() < 0.15
    horizon_s = rng.choice([0.3, 1.0, 2.0])
    ahead = rng.random() < 0.5
    limits = _with_targets(_limits(rng), random.Random(seed ^ 0x71E))
    return Scene(
        seed=seed,
        engines=engines,
        fronts=fronts,
        has_coordinator=has_coordinator,
        balance=rng.choice(sorted(BALANCES)),
        policy=rng.choice(POLICIES.own_names()),
        depth=2 if ahead else rng.choice([1, 1, 2, 3]),
        ahead=ahead,
        limits=limits,
        costs=[StepCosts(step_s=rng.choice([0.002, 0.01, 0.04])) for _ in engines],
        delays=rng.choice([(0.0002, 0.0002, 0.0), (0.001, 0.05, 0.05), (0.01, 0.3, 0.05), (0.05, 0.05, 0.0)]),
        twice=rng.choice([0.0, 0.0, 0.1]),
        most_unread=max(rng.choice([4096, 4096, 24]), 4096 if only_coordinator else 0),
        step_timeout=rng.choice([2.0, 5.0]),
        asks=_asks(rng, limits, engines, fronts, horizon_s, calm=only_coordinator),
        faults=draw_faults(
            rng,
            engines,
            ["coordinator"] if has_coordinator else [],
            fronts,
            horizon_s=horizon_s,
            most=rng.choice([0, 2, 4, 8]),
            only_coordinator=only_coordinator,
        ),
        horizon_s=horizon_s,
        only_coordinator=only_coordinator,
    )


def _with_targets(limits: Limits, rng: random.Random) -> Limits:
    """Drawn apart from the rest, so that a seed keeps the rest of its scene."""
    itl_target = rng.choice([inf, inf, 0.005, 0.02, 0.05])
    ttft_target = rng.choice([0.0, 0.0, 0.0, 0.2]) if itl_target < inf else 0.0
    return msgspec.structs.replace(limits, itl_target=itl_target, ttft_target=ttft_target)


def _limits(rng: random.Random) -> Limits:
    block_size = rng.choice([1, 2, 4, 8])
    is_tight = rng.random() < 0.2
    return Limits(
        max_len=MAX_LEN,
        vocab_size=VOCAB,
        num_blocks=-(-MAX_LEN // block_size) + rng.choice([0, 2, 8, 40]),
        block_size=block_size,
        max_num_seqs=rng.choice([1, 2, 4, 8]),
        max_num_tokens=rng.choice([4, 16, 64]),
        chunk=rng.choice([1, 4, 16, 64]),
        max_waiting=rng.choice([1, 4]) if is_tight else 64,
        max_waiting_tokens=4096,
        queue_timeout=rng.choice([0.2, 1.0]) if rng.random() < 0.1 else 0.0,
        prefix_cache=rng.random() < 0.7,
    )


def _asks(
    rng: random.Random, limits: Limits, engines: list[str], fronts: list[str], horizon_s: float, *, calm: bool
) -> list[Ask]:
    count = rng.choice([2, 4, 8, 12])
    sources = [[rng.randrange(FIRST_TOKEN, limits.vocab_size) for _ in range(MAX_LEN)] for _ in range(2)]
    is_burst = rng.random() < 0.3
    has_poison = not calm and rng.random() < 0.05
    asks = []
    for index in range(count):
        at = 0.35 + (0.0 if is_burst else rng.random() * 1.5 * horizon_s)
        ask = Ask(index, at, rng.choice(fronts), [])
        length = rng.randint(1, rng.choice([4, 12, MAX_LEN - 8]))
        prompt = list(rng.choice(sources)[:length])
        if not calm:
            _behave(rng, ask, prompt, engines)
        if has_poison and index == 0:
            ask.is_poison = True
            prompt[rng.randrange(len(prompt))] = POISON_TOKEN
        ask.replays = _replays(rng, prompt, ask)
        asks.append(ask)
    return asks


def _behave(rng: random.Random, ask: Ask, prompt: list[int], engines: list[str]) -> None:
    kind = rng.random()
    if kind < 0.04:
        ask.is_bad = True
        prompt += [FIRST_TOKEN] * MAX_LEN
    elif kind < 0.08:
        ask.is_faulty = True
        prompt[rng.randrange(len(prompt))] = FAULT_TOKEN
    elif kind < 0.2:
        ask.leaves_after_s = rng.choice([0.0005, 0.02, 0.2])
    elif kind < 0.28:
        ask.read_s = rng.choice([0.02, 0.3])
    elif kind < 0.33:
        ask.pin = rng.randrange(len(engines))
    elif kind < 0.4:
        ask.total_s = rng.choice([0.05, 0.5, 2.0])


def _replays(rng: random.Random, prompt: list[int], ask: Ask) -> list[Replay]:
    num_choices = rng.choice([1, 1, 1, 2, 3])
    num_prompts = rng.choice([1, 1, 1, 2]) if not (ask.is_bad or ask.is_faulty or ask.is_poison) else 1
    seed, max_tokens = rng.getrandbits(31), rng.choice([1, 3, 8, 8])
    logprobs = 0 if rng.random() < 0.1 else -1
    client = bytes([rng.randrange(3)])
    replays = []
    for prompt_index in range(num_prompts):
        ids = np.array(prompt[: len(prompt) - prompt_index] or prompt, np.int32)
        for choice in range(num_choices):
            params = RowParams(
                max_tokens,
                min_tokens=min(max_tokens, rng.choice([0, 0, 2])),
                seed=seed,
                choice=choice,
                eos_token_ids=(EOS,),
                logprobs=logprobs,
            )
            replays.append(
                Replay(
                    ids,
                    params,
                    prompt_index=prompt_index,
                    priority=rng.choice([0, 0, 1]),
                    total_s=ask.total_s,
                    client=client,
                )
            )
            if rng.random() < 0.06:
                ask.stops_at[len(replays) - 1] = rng.randint(1, max_tokens)
    return replays
