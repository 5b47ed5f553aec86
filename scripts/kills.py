"""Kills processes of a serving deployment at random moments and compares every answer with the undisturbed one, token by token.

  python -m scripts.kills [--rounds 200] [--coordinator-rounds 50] [--model smollm2] [--tp 1] [--seed 0]

A round sends mixed streams (n=2, seeds, stop strings, penalties, log-probabilities, greedy) to two engines with workers in
processes of their own, and kills one engine or worker with SIGKILL at a random moment while they run. Coordinator rounds kill the
coordinator under load and take the time until it routes again by what the engines have reported. The status is 1 unless every
answer was whole and equal, all blocks came back, and each coordinator was back within 2 s.
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from launch.restarts import RestartLimits
from launch.supervise import Died, Event, Supervisor, Timing
from transport.messages import Call, CallReply, FromCoordinator
from transport.sockets import Connection, Poller
from trireme.resolve import prepare
from trireme.settings import load

PATIENT = RestartLimits(first_s=0.05, longest_s=0.05, most=None)  # the deployment is to survive any number of kills
BACK_S = 2.0
PROMPTS = ("Once upon a time", "The ferry crosses twice a day, except", "def fibonacci(n):", "To be, or not to be,")

Answer = dict[str, Any]


class Deployment:
    """A supervisor in a thread of its own, over the real parts."""

    def __init__(self, model: str, dp: int, tp: int, *, ep: bool = False) -> None:
        settings = {"model": model, "port": 0, "dp": dp, "tp": tp, "ep": ep, "executor": "procs", "log_level": "error"}
        settings |= {"max_num_seqs": 32, "num_blocks": 1024}
        self.died: list[Died] = []
        config = prepare(load(settings).config).config
        self.supervisor = Supervisor(config, self._on_event, timing=Timing(restarts=PATIENT))
        self._stop = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Deployment:
        self._thread.start()
        until(lambda: self.supervisor.is_ready or not self._thread.is_alive(), 120.0, "readiness")
        self.until_whole()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop = True
        self._thread.join(30.0)

    def _run(self) -> None:
        try:
            self.supervisor.start()
            while not self.supervisor.is_finished and not self._stop:
                self.supervisor.step(0.1)
        finally:
            self.supervisor.close()

    def _on_event(self, event: Event) -> None:
        if isinstance(event, Died):
            self.died.append(event)

    def get(self, path: str) -> tuple[int, str]:
        assert self.supervisor.address is not None
        connection = http.client.HTTPConnection("127.0.0.1", self.supervisor.address[1], timeout=10.0)
        try:
            connection.request("GET", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    def pids(self, role: str) -> list[int]:
        """Living processes of one role; those of workers are children of engines."""
        if role == "worker":
            return [child for pid in self.pids("engine") for child in children(pid)]
        born = [part.child for part in self.supervisor.parts if part.role == role]
        return [child.pid for child in born if child is not None]

    def until_whole(self) -> None:
        """Every engine is up and makes progress."""
        until(lambda: json.loads(self.get("/ready")[1])["status"] == "ready", 60.0, "all engines up")

    def owned_blocks(self) -> float:
        lines = self.get("/metrics")[1].splitlines()
        wanted = ("trireme_kv_blocks{", "trireme_requests_running{", "trireme_requests_waiting{")
        found = [
            line for line in lines if line.startswith(wanted) and 'state="free"' not in line and "cached" not in line
        ]
        return sum(float(line.rsplit(" ", 1)[1]) for line in found)

    def ask(self, body: dict[str, Any]) -> Answer:
        """One stream as what it says in the end, per choice; "error" when it broke."""
        assert self.supervisor.address is not None
        connection = http.client.HTTPConnection("127.0.0.1", self.supervisor.address[1], timeout=120.0)
        whole: Answer = {"choices": {}, "error": "it did not end"}
        try:
            connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            if answer.status != 200:
                return {"error": answer.read().decode()}
            for line in answer:
                if line.startswith(b"data: [DONE]"):
                    del whole["error"]
                elif line.startswith(b"data: "):
                    collect(whole, json.loads(line[6:]))
        except (OSError, http.client.HTTPException) as error:
            whole["error"] = repr(error)
        finally:
            connection.close()
        return whole

    def ask_all(self, bodies: list[dict[str, Any]]) -> list[Answer]:
        with ThreadPoolExecutor(len(bodies)) as pool:
            return list(pool.map(self.ask, bodies))


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def until(true: Callable[[], bool], timeout_s: float, what: str) -> float:
    """Seconds until it was true. Raises TimeoutError."""
    began = time.monotonic()
    while not true():
        if time.monotonic() - began > timeout_s:
            raise TimeoutError(f"not within {timeout_s:g} s: {what}")
        time.sleep(0.01)
    return time.monotonic() - began


def collect(whole: Answer, event: dict[str, Any]) -> None:
    """Adds one event of a stream to its answer."""
    if "error" in event:
        whole["failed"] = event["error"]
        return
    if event.get("usage"):
        whole["usage"] = [event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]]
    for part in event["choices"]:
        choice = whole["choices"].setdefault(part["index"], {"text": "", "ids": [], "ends": [], "logprobs": {}})
        choice["text"] += part["text"]
        choice["ids"] += part.get("token_ids", [])
        if part.get("finish_reason"):
            choice["ends"].append([part["finish_reason"], part.get("stop_reason")])
        for key, values in (part.get("logprobs") or {}).items():
            choice["logprobs"].setdefault(key, []).extend(values)


def requests(model: str, length: int) -> list[dict[str, Any]]:
    """Bodies of one round, before stop strings are known."""
    shared = {"model": model, "stream": True, "max_tokens": length, "return_token_ids": True, "ignore_eos": True}
    shared["stream_options"] = {"include_usage": True}
    kinds: list[dict[str, Any]] = [
        {"n": 2, "seed": 11, "temperature": 0.9, "logprobs": 2},
        {"n": 2, "seed": 12, "temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
        {"n": 2, "seed": 13, "temperature": 0.7, "min_tokens": length // 2, "ignore_eos": False, "top_k": 40},
        {"temperature": 0.0, "stop": True},
        {"n": 2, "seed": 14, "temperature": 0.8, "stop": True, "logprobs": 0},
    ]
    return [shared | kind | {"prompt": PROMPTS[i % len(PROMPTS)]} for i, kind in enumerate(kinds)]


def with_stops(deployment: Deployment, bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Where a body asks for a stop string: a piece of two characters of its own text, from beyond the middle."""
    found = []
    for body in bodies:
        if body.get("stop") is True:
            text = deployment.ask({**body, "stop": None})["choices"][0]["text"]
            body = {**body, "stop": first_seen_late(text)}
        found.append(body)
    return found


def first_seen_late(text: str) -> list[str]:
    pairs = (text[at : at + 2] for at in range(len(text) // 2, len(text) - 2))
    return next(([pair] for pair in pairs if pair.isascii() and text.find(pair) >= len(text) // 2), ["\n\n"])


def kill_rounds(deployment: Deployment, model: str, rounds: int, length: int, rng: random.Random) -> int:
    """Rounds that were not equal to the undisturbed one."""
    bodies = with_stops(deployment, requests(model, length))
    began = time.monotonic()
    reference = deployment.ask_all(bodies)
    usual_s = time.monotonic() - began
    broken = [answer for answer in reference if "error" in answer or "failed" in answer]
    if broken or deployment.ask_all(bodies) != reference:
        raise RuntimeError(f"undisturbed rounds differ: {broken}")
    stops = sum(end[1] is not None for a in reference for c in a["choices"].values() for end in c["ends"])
    print(f"{len(bodies)} streams, {usual_s:.2f} s undisturbed, {stops} choices end at a stop string", flush=True)
    num_bad = num_done = num_moved = 0
    while num_done < rounds:
        before = len(deployment.died)
        with ThreadPoolExecutor(len(bodies)) as pool:
            running = [pool.submit(deployment.ask, body) for body in bodies]
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


def difference(reference: list[Answer], answers: list[Answer]) -> str:
    for i, (want, got) in enumerate(zip(reference, answers, strict=True)):
        if want != got:
            if "error" in got or "failed" in got:
                return f"stream {i}: {got.get('error', '')} {got.get('failed', '')}"
            for index, choice in want["choices"].items():
                for key, value in choice.items():
                    if value != got["choices"].get(index, {}).get(key):
                        return f"stream {i} choice {index} {key}: {value!r:.300} became {got['choices'][index][key]!r:.300}"
            return f"stream {i}: {want.get('usage')} became {got.get('usage')}"
    return "nothing"


class Probe:
    """Asks the coordinator what it knows."""

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
    """Requests that failed or differed, and coordinators that were late."""
    bodies = with_stops(deployment, requests(model, 48))
    reference = deployment.ask_all(bodies)
    stop = threading.Event()
    counts = {"whole": 0, "bad": 0}

    def keep_asking(which: int) -> None:
        while not stop.is_set():
            counts["whole" if deployment.ask(bodies[which]) == reference[which] else "bad"] += 1

    threads = [threading.Thread(target=keep_asking, args=(i,)) for i in range(len(bodies))]
    probe, backs = Probe(deployment), []
    probe.until_routing(0, 10.0)
    for thread in threads:
        thread.start()
    try:
        for _ in range(rounds):
            time.sleep(rng.uniform(1.0, 1.5))  # it had been well
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
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--coordinator-rounds", type=int, default=50)
    parser.add_argument("--length", type=int, default=96)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument(
        "--ep", action="store_true", help="engines in lock step, with the experts of a mixture split over them"
    )
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng, num_bad = random.Random(options.seed), 0
    with Deployment(options.model, 2, options.tp, ep=options.ep) as deployment:
        model = json.loads(deployment.get("/v1/models")[1])["data"][0]["id"]
        if options.rounds:
            num_bad += kill_rounds(deployment, model, options.rounds, options.length, rng)
        if options.coordinator_rounds:
            num_bad += coordinator_rounds(deployment, model, options.coordinator_rounds, rng)
    return int(num_bad > 0)


if __name__ == "__main__":
    sys.exit(main())
