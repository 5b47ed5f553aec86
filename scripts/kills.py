"""Kills processes of a serving deployment at random moments and compares every answer with an undisturbed run, token by token.

  python -m scripts.kills [--rounds 200] [--coordinator-rounds 50] [--model smollm2] [--tp 1] [--seed 0]

A round sends mixed streams (n=2, seeds, stop strings, penalties, log-probabilities, greedy) to two engines with workers in
processes of their own, and kills one engine or worker with SIGKILL at a random moment while they run. Coordinator rounds kill the
coordinator under load and take the time until it routes again by what the engines have reported. The status is 1 unless every
answer was whole and equal, all blocks came back, and each coordinator was back within 2 s.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

from scripts.deployment import Deployment, until
from scripts.streams import ask, ask_all, difference, requests, undisturbed, with_stops
from trireme.transport.sockets.names import Connection, Poller
from trireme.transport.wire.messages import Call, CallReply, FromCoordinator

BACK_S = 2.0


def kill_rounds(deployment: Deployment, model: str, rounds: int, length: int, rng: random.Random) -> int:
    """The number of rounds whose answers differ from those of the undisturbed run."""
    bodies = with_stops(deployment.port, requests(model, length))
    reference = undisturbed(deployment.port, bodies)
    began = time.monotonic()
    ask_all(deployment.port, bodies)
    usual_s = time.monotonic() - began
    stops = sum(end[1] is not None for answer in reference for c in answer.choices.values() for end in c["ends"])
    print(f"{len(bodies)} streams, {usual_s:.2f} s undisturbed, {stops} choices end at a stop string", flush=True)
    num_bad = num_done = num_moved = 0
    while num_done < rounds:
        before = len(deployment.died)
        with ThreadPoolExecutor(len(bodies)) as pool:
            running = [pool.submit(ask, deployment.port, body) for body in bodies]
            time.sleep(rng.uniform(0.0, usual_s))
            role = rng.choice(["engine", "worker"])
            victim = rng.choice(deployment.pids(role) or deployment.pids("engine"))
            was_running = not all(stream.done() for stream in running)
            os.kill(victim, signal.SIGKILL)
            answers = [stream.result() for stream in running]
        until(lambda before=before: len(deployment.died) > before, 10.0, "the death is noticed")  # type: ignore[misc]
        deployment.until_whole()
        if answers != reference:
            num_bad += 1
            print(f"round {num_done} ({role}): {difference(reference, answers)}", flush=True)
        num_done += was_running or answers != reference  # a kill after the last token proves nothing
        num_moved += was_running
        if num_done and num_done % 20 == 0:
            print(f"{num_done} kills, {num_bad} bad", flush=True)
    until(lambda: deployment.owned_blocks() == 0.0, 5.0, "all blocks back")
    print(
        f"kills: {num_done - num_bad} of {num_done} equal to the undisturbed answers, {num_moved} under way; all blocks back"
    )
    return num_bad


class Probe:
    """Queries the coordinator's state."""

    def __init__(self, deployment: Deployment) -> None:
        self._link = Connection.open(deployment.supervisor.boot_for("admin", "probe"), "coordinator", FromCoordinator)
        self._poller = Poller()
        self._poller.add(self._link, self._on_messages)
        self._states: list[str] = []
        self._next_call = 0

    @property
    def epoch(self) -> int:
        return self._link.welcome.epoch if self._link.welcome is not None else -1

    def _on_messages(self) -> None:
        for message in self._link.receive():
            if isinstance(message, CallReply) and message.ok:
                self._states = [str(member[3]) for member in message.result["members"]]

    def until_routing(self, epoch: int, timeout_s: float) -> float:
        """Seconds until a coordinator of at least this epoch has every engine ready, by their reports."""
        self._states, began = [], time.monotonic()
        while self.epoch < epoch or not self._states or set(self._states) != {"ready"}:
            if time.monotonic() - began > timeout_s:
                raise TimeoutError(f"epoch {self.epoch}, engines {self._states}")
            self._next_call += 1
            self._link.send(Call(self._next_call, "stats"))
            self._poller.wait(0.01)
        return time.monotonic() - began


def coordinator_rounds(deployment: Deployment, model: str, rounds: int, rng: random.Random) -> int:
    """The number of requests that failed or differed, plus coordinators that were late."""
    bodies = with_stops(deployment.port, requests(model, 48))
    reference = undisturbed(deployment.port, bodies)
    stop = threading.Event()
    counts = {"whole": 0, "bad": 0}

    def keep_asking(which: int) -> None:
        while not stop.is_set():
            counts["whole" if ask(deployment.port, bodies[which]) == reference[which] else "bad"] += 1

    threads = [threading.Thread(target=keep_asking, args=(i,)) for i in range(len(bodies))]
    probe, backs = Probe(deployment), []
    probe.until_routing(0, 10.0)
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            time.sleep(rng.uniform(1.0, 1.5))  # it had been healthy
            epoch = probe.epoch
            os.kill(deployment.pids("coordinator")[0], signal.SIGKILL)
            backs.append(probe.until_routing(epoch + 1, 30.0))
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    late = sum(back > BACK_S for back in backs)
    print(
        f"coordinator: {rounds} kills under load, {counts['whole']} requests whole, {counts['bad']} failed; routing again after "
        f"{sorted(backs)[len(backs) // 2]:.2f} s (median), {max(backs):.2f} s (longest), {late} later than {BACK_S:g} s"
    )
    return counts["bad"] + late


def main() -> int:
    """Runs the rounds that the flags ask for; exit status 1 when any went wrong."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--coordinator-rounds", type=int, default=50)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--ep", action="store_true", help="engines in lockstep, with the experts of an MoE model split over them"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, num_bad = random.Random(options.seed), 0
    with Deployment({"model": options.model, "dp": 2, "tp": options.tp, "ep": options.ep}) as deployment:
        model = deployment.model_name()
        if options.rounds:
            num_bad += kill_rounds(deployment, model, options.rounds, options.length, rng)
        if options.coordinator_rounds:
            num_bad += coordinator_rounds(deployment, model, options.coordinator_rounds, rng)
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
