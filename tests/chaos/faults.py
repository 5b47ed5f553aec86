"""The table of faults: what is done to which process, how soon that must be noticed, and what clients may see of it.

Judged by tests/chaos/rounds.py.
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from resource import RLIMIT_AS, RLIMIT_NOFILE
from typing import Literal

from tests.chaos.messages import KINDS, harming
from tests.chaos.poison import BAD_SEED, NAN_TOKEN, asking
from tests.chaos.resources import filling, limiting, no_blocks, starved
from tests.chaos.site import Inject, Injury, Site, client_ports, kill, part_of, send, stopped
from trireme.engine_core.executor.procs import LAST_WORDS_S

DEATH_S = 1.0  # R2: a process's death is noticed
RANK_S = DEATH_S + LAST_WORDS_S  # that of a worker is told when the others have said why
STUCK_S = 15.0  # R3: what lives and does nothing is noticed
TRUTH_S = 2.0  # /ready says so
ENDED_S = STUCK_S + 3.0  # what is stuck has been ended, its last words included

Notice = Literal["", "death", "stall"]


@dataclass(frozen=True)
class Fault:
    """`shape` names the deployment (tests/chaos/shapes.py). `notice`: whether a death must be told or a stall be seen in /ready,
    within `within_s`; `lasts_s`: how long until it is ended (0: at once). Clients see nothing, but for those streams whose
    connection the injury names. `missing` says why it cannot be done yet."""

    name: str
    family: Literal["kill", "freeze", "message", "resource", "request"]
    inject: Inject | None = None
    shape: str = "plain"
    notice: Notice = ""
    within_s: float = 0.0
    lasts_s: float = 0.0
    may_die: bool = False  # parts may be ended and started again, which clients do not notice
    missing: str = ""


def killing(role: str, index: int | None = 0, *, every: bool = False) -> Inject:
    """kill -9 of one process of a role (index None: any of them), or of `every` one."""

    @contextlib.contextmanager
    def inject(site: Site, rng: Random) -> Iterator[Injury]:
        pids = site.deployment.pids(role)
        numbers = range(len(pids)) if every else [rng.randrange(len(pids)) if index is None else index]
        injury = Injury()
        for number in numbers:
            injury.parts.append(part_of(role, number))
            injury.ports |= kill(site.pid(role, number))
        yield injury

    return inject


def freezing(role: str, *, for_good: bool) -> Inject:
    """SIGSTOP of one process of a role. For good: it is the deployment that must end it."""

    @contextlib.contextmanager
    def inject(site: Site, rng: Random) -> Iterator[Injury]:
        number = rng.randrange(2) if role in ("engine", "front") else 0
        pid = site.pid(role, number)
        if for_good:
            send(pid, signal.SIGSTOP)
            yield Injury([part_of(role, number)], client_ports(pid))
        else:
            with stopped(pid):
                yield Injury()

    return inject


def _freezes() -> Iterator[Fault]:
    targets = {"coordinator": "coordinator", "engine": "engine-core", "worker": "worker", "front": "api-server"}
    for role, name in targets.items():
        shape: str = "tp" if role == "worker" else "plain"
        seen: Notice = "stall" if role in ("engine", "worker") else ""
        short = freezing(role, for_good=False)
        yield Fault(f"freeze-5s-{name}", "freeze", short, shape, seen, TRUTH_S, lasts_s=5.0)
        yield Fault(f"freeze-{name}", "freeze", freezing(role, for_good=True), shape, "death", ENDED_S)


ROLES = ("coordinator", "engine", "worker", "front")
NO_PREFILL = "prefill and decode are not apart yet"
NO_GRAMMAR = "there are no grammars yet"

FAULTS: tuple[Fault, ...] = (
    Fault("kill-api-server", "kill", killing("front", every=True), notice="death", within_s=DEATH_S),
    Fault("kill-one-api-server", "kill", killing("front", None), notice="death", within_s=DEATH_S),
    Fault("kill-coordinator", "kill", killing("coordinator"), notice="death", within_s=DEATH_S),
    Fault("kill-engine-core", "kill", killing("engine", None), notice="death", within_s=DEATH_S),
    Fault("kill-tp-worker", "kill", killing("worker", 1), "tp", "death", RANK_S),
    Fault("kill-pp-first-stage", "kill", killing("worker", 0), "pp", "death", RANK_S),
    Fault("kill-pp-last-stage", "kill", killing("worker", 1), "pp", "death", RANK_S),
    Fault("kill-prefill-node", "kill", missing=NO_PREFILL),
    Fault("kill-decode-node", "kill", missing=NO_PREFILL),
    Fault("kill-kv-store", "kill", missing="there is no KV store yet"),
    Fault("kill-grammar-worker", "kill", missing=NO_GRAMMAR),
    *_freezes(),
    Fault("no-free-blocks", "resource", no_blocks, "few"),
    Fault("no-memory", "resource", limiting(RLIMIT_AS, ("engine", "worker")), lasts_s=3.0, may_die=True),
    Fault("shm-full", "resource", filling("shm", "worker", "engine"), "full", "death", RANK_S),
    Fault("no-file-handles", "resource", limiting(RLIMIT_NOFILE, ROLES), lasts_s=3.0),
    Fault("disk-full", "resource", filling("tmp", "coordinator", "engine", "front"), "full", "death", DEATH_S),
    Fault("cpu-starved", "resource", starved, lasts_s=4.0),
    Fault("sampler-exception", "request", asking({"seed": BAD_SEED}), "wired"),
    Fault("nan-logits", "request", asking({"prompt": [97] * 40 + [NAN_TOKEN] + [98] * 40}), "nan"),
    *(Fault(f"message-{kind}", "message", harming(kind), "wired", may_die=True) for kind in KINDS),
    Fault("endless-grammar", "request", missing=NO_GRAMMAR),
)
