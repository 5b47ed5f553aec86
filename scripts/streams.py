"""Mixed streams for fault injection, and a record of every answer, to be compared with the undisturbed run.

A client of the HTTP port and nothing more. Used by scripts/kills.py and tests/chaos.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Literal

QUIET_S = 90.0  # a stream silent for longer is hung: exceeds the time that a request waits for an engine
PROMPTS = ("Once upon a time", "The ferry crosses twice a day, except", "def fibonacci(n):", "To be, or not to be,")

Body = dict[str, Any]
How = Literal["", "done", "cancelled", "broken", "error", "refused", "hung"]


@dataclass
class Answer:
    """The content of one stream, per choice, and how it ended: complete, cut off by us, connection broken, an error event, a
    status other than 200, or not at all."""

    end: How = ""
    detail: str = ""
    choices: dict[int, dict[str, Any]] = field(default_factory=dict)
    usage: list[int] | None = None
    num_events: int = field(default=0, compare=False)
    local_port: int = field(default=0, compare=False)

    def add(self, event: dict[str, Any]) -> None:
        """Adds one event of the stream."""
        self.num_events += 1
        if "error" in event:
            self.end, self.detail = "error", f"{event['error'].get('code')}: {event['error'].get('message')}"
            return
        if event.get("usage"):
            self.usage = [event["usage"]["prompt_tokens"], event["usage"]["completion_tokens"]]
        for part in event["choices"]:
            choice = self.choices.setdefault(part["index"], {"text": "", "ids": [], "ends": [], "logprobs": {}})
            choice["text"] += part["text"]
            choice["ids"] += part.get("token_ids", [])
            if part.get("finish_reason"):
                choice["ends"].append([part["finish_reason"], part.get("stop_reason")])
            for key, values in (part.get("logprobs") or {}).items():
                choice["logprobs"].setdefault(key, []).extend(values)

    def is_beginning_of(self, whole: Answer) -> bool:
        """Whether this is a prefix of `whole`, in order, and no choice ended twice."""
        for index, choice in self.choices.items():
            other = whole.choices.get(index)
            if other is None or len(choice["ends"]) > 1 or (choice["ends"] and choice["ends"] != other["ends"]):
                return False
            if not other["text"].startswith(choice["text"]) or other["ids"][: len(choice["ids"])] != choice["ids"]:
                return False
        return True


def ask(port: int, body: Body, *, cancel_after: int = 0, answer: Answer | None = None) -> Answer:
    """Reads one stream to its end, past [DONE], or leaves after `cancel_after` events. `answer` is filled as events arrive."""
    answer = answer if answer is not None else Answer()
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=QUIET_S)
    try:
        connection.connect()
        answer.local_port = connection.sock.getsockname()[1]
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        if reply.status != 200:
            answer.end, answer.detail = "refused", f"{reply.status}: {reply.read().decode()}"
            return answer
        num_done = 0
        for line in reply:
            if line.startswith(b"data: [DONE]"):
                num_done += 1
            elif line.startswith(b"data: "):
                answer.add(json.loads(line[6:]))
            if cancel_after and answer.num_events >= cancel_after:
                answer.end = "cancelled"
                return answer
        if not answer.end:
            answer.end = "done" if num_done == 1 else "broken"
            answer.detail = "" if num_done == 1 else f"it ended with {num_done} times [DONE]"
    except TimeoutError as error:
        answer.end, answer.detail = "hung", repr(error)
    except (OSError, http.client.HTTPException) as error:
        answer.end, answer.detail = "broken", repr(error)
    finally:
        connection.close()
    return answer


def ask_all(port: int, bodies: Sequence[Body]) -> list[Answer]:
    with ThreadPoolExecutor(len(bodies)) as pool:
        return list(pool.map(lambda body: ask(port, body), bodies))


def requests(model: str, length: int, count: int = 6) -> list[Body]:
    """Request bodies of one round, of six kinds in turn, without stop strings yet."""
    shared = {"model": model, "stream": True, "max_tokens": length, "return_token_ids": True, "ignore_eos": True}
    shared["stream_options"] = {"include_usage": True}
    kinds: list[Body] = [
        {"n": 2, "seed": 11, "temperature": 0.9, "logprobs": 2},
        {"n": 2, "seed": 12, "temperature": 1.2, "top_p": 0.9, "frequency_penalty": 0.4, "presence_penalty": 0.2},
        {"temperature": 0.0, "logprobs": 1, "repetition_penalty": 1.2},
        {"n": 2, "seed": 13, "temperature": 0.7, "min_tokens": length // 2, "ignore_eos": False, "top_k": 40},
        {"temperature": 0.0, "stop": True},
        {"n": 2, "seed": 14, "temperature": 0.8, "stop": True, "logprobs": 0},
    ]
    bodies = []
    for i in range(count):
        again, kind = divmod(i, len(kinds))
        body = shared | kinds[kind] | {"prompt": PROMPTS[i % len(PROMPTS)] + " again" * again}
        if "seed" in body:
            body["seed"] += 100 * again
        bodies.append(body)
    return bodies


def with_stops(port: int, bodies: Sequence[Body]) -> list[Body]:
    """Adds to bodies that need one a stop string: two characters of its own text, from beyond the middle."""
    wanting = [body for body in bodies if body.get("stop") is True]
    texts = [answer.choices[0]["text"] for answer in ask_all(port, [{**body, "stop": None} for body in wanting])]
    stops = iter(map(first_seen_late, texts))
    return [{**body, "stop": next(stops)} if body.get("stop") is True else body for body in bodies]


def first_seen_late(text: str) -> list[str]:
    pairs = (text[at : at + 2] for at in range(len(text) // 2, len(text) - 2))
    return next(([pair] for pair in pairs if pair.isascii() and text.find(pair) >= len(text) // 2), ["\n\n"])


def undisturbed(port: int, bodies: Sequence[Body]) -> list[Answer]:
    """The answers to all bodies sent at once, sent twice. Raises RuntimeError unless they are complete and equal."""
    reference = ask_all(port, bodies)
    broken = [answer for answer in reference if answer.end != "done"]
    if broken or (again := ask_all(port, bodies)) != reference:
        raise RuntimeError(f"undisturbed rounds differ: {broken or difference(reference, again)}")
    return reference


def difference(reference: Sequence[Answer], answers: Sequence[Answer]) -> str:
    """The first difference, in words; "nothing" if none."""
    for i, (want, got) in enumerate(zip(reference, answers, strict=True)):
        if want != got:
            return f"stream {i}: {difference_of(want, got)}"
    return "nothing"


def difference_of(want: Answer, got: Answer) -> str:
    """The first difference between two answers, in words."""
    if got.end != want.end:
        return f"{got.end} {got.detail}"
    for index, choice in want.choices.items():
        for key, value in choice.items():
            other = got.choices.get(index, {}).get(key)
            if value != other:
                return f"choice {index} {key}: {value!r:.300} became {other!r:.300}"
    return f"{want.usage} became {got.usage}"
