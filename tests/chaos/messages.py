"""Harm to one message between two processes of a deployment whose sockets take orders (tests/chaos/wired)."""

from __future__ import annotations

import contextlib
import json
import socket
from collections.abc import Iterator
from random import Random
from typing import Literal

from tests.chaos.site import Inject, Injury, Site
from tests.chaos.wired.sockets import DONE_S, control_path

Kind = Literal["drop", "delay", "reorder", "duplicate", "truncate", "flip", "version", "oversize"]
KINDS: tuple[Kind, ...] = ("drop", "delay", "reorder", "duplicate", "truncate", "flip", "version", "oversize")

CONTROL = [("coordinator", "coordinator"), ("engine-{}", "coordinator"), ("front-{}", "coordinator")]
DATA = [("engine-{}", "front"), ("front-{}", "front"), ("engine-{}", "workers"), ("engine-{}.worker-0", "workers")]
MOST_SKIPPED = 20  # messages that pass before the one that is harmed; rare messages come one at a time


def harming(kind: Kind) -> Inject:
    """One message on a control or, in turn, on a data socket, sent by any process that has one."""

    @contextlib.contextmanager
    def inject(site: Site, rng: Random) -> Iterator[Injury]:
        sender, link = rng.choice(CONTROL if rng.random() < 0.5 else DATA)
        name = sender.format(rng.randrange(2))
        is_rare = link == "coordinator" or name.startswith("front")
        skip = 0 if is_rare else rng.randrange(MOST_SKIPPED)
        injury = Injury(what=f"{name} to {link}")
        with order(site, name, kind, link, skip, rng.randrange(1 << 30)) as reply:
            yield injury
            injury.is_done = reply.recv(1) == b"1"

    return inject


@contextlib.contextmanager
def order(site: Site, name: str, kind: Kind, link: str, skip: int, seed: int) -> Iterator[socket.socket]:
    """Gives the order; what comes back says whether a message came by and was harmed."""
    run_dir = site.deployment.supervisor.boot_for("admin", "chaos").run_dir
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as control:
        control.settimeout(2 * DONE_S)
        control.connect(str(control_path(run_dir, name)))
        control.send(json.dumps({"kind": kind, "link": link, "skip": skip, "seed": seed}).encode())
        yield control
