"""Replay state: all that is needed to continue one choice on another engine. Kept by the frontend, because engines die.

Pure. Made by serving/text/processor.py, filled by serving/engines/client.py as tokens arrive.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from trireme.params import RowParams
from trireme.transport.wire.messages import MAX_WAITED_S, Submit

LEAST_WAIT_S = 0.001  # what is left of a deadline that has passed
FRESH_S = 1.0  # how long a first submit may take to reach an engine without being older than others there


class Cursor(Protocol):
    """A place in something that follows the output token by token, as in a grammar."""

    def restart(self, emitted: Sequence[int]) -> None:
        """Back to the beginning, and over all of `emitted`."""


class RequestLimits(NamedTuple):
    """On what terms a request is served. Seconds; 0: no limit, and for `itl_target_s` the engines' own target. `scope` is a secret
    that those who may share cached prefixes have in common (it stays in the frontend); empty: everybody without one."""

    client: bytes = b""
    priority: int = 0
    queue_s: float = 0.0
    total_s: float = 0.0
    scope: bytes = b""
    itl_target_s: float = 0.0


class Replay:
    """One choice of one prompt. `emitted` are the ids received so far; the seed and every limit are in `params`.

    Noise is a function of (seed, choice, absolute position), so a resubmitted choice draws what it would have drawn.
    """

    __slots__ = (
        "client",
        "cursor",
        "deadline_s",
        "emitted",
        "has_first",
        "is_suspect",
        "itl_target_s",
        "num_moves",
        "num_scored",
        "num_submits",
        "params",
        "priority",
        "prompt",
        "prompt_index",
        "salt",
        "stays",
        "total_s",
    )

    def __init__(
        self,
        prompt: np.ndarray,
        params: RowParams,
        *,
        prompt_index: int = 0,
        salt: bytes = b"",
        priority: int = 0,
        deadline_s: float = 0.0,
        total_s: float = 0.0,
        client: bytes = b"",
        itl_target_s: float = 0.0,
    ) -> None:
        self.prompt = prompt  # int32, never written to
        self.params = params
        self.prompt_index = prompt_index
        self.salt = salt
        self.priority = priority
        self.deadline_s = deadline_s
        self.total_s = total_s  # from its first submit to its end; 0: no limit
        self.client = client
        self.itl_target_s = itl_target_s  # seconds between tokens; 0: as its engine has it
        self.emitted = array("i")
        self.num_scored = 0  # prompt positions whose log-probabilities were received
        self.has_first = False  # a First was received
        self.num_submits = 0
        self.stays = False  # its caller demanded an engine
        self.num_moves = 0  # from engines that died
        self.is_suspect = False  # it was running on an engine that died, and has gained nothing since
        self.cursor: Cursor | None = None  # what must follow the output anew after a move

    def submit(self, rid: int, ticket: int = 0, *, passed_s: float = 0.0, waited_s: float = 0.0) -> Submit:
        """The message that starts this choice, or continues it after the tokens emitted so far. `passed_s`: since its request
        began, `waited_s`: since it first wanted an engine. One that comes late, for want of an engine or after it lost one, gets
        the place in the queue that its age deserves."""
        self.num_submits += 1
        prompt = self.prompt
        if self.emitted:
            prompt = np.concatenate([prompt, np.array(self.emitted, dtype=np.int32)])
        if self.cursor is not None and self.num_submits > 1:
            self.cursor.restart(self.emitted)
        return Submit(
            rid=rid,
            prompt=prompt,
            params=self.params,
            salt=self.salt,
            ticket=ticket,
            priority=self.priority,
            deadline_s=self.deadline_s,
            num_replayed=len(self.emitted),
            num_moves=self.num_submits - 1,
            stays=self.stays,
            client=self.client,
            total_s=max(0.001, self.total_s - passed_s) if self.total_s else 0.0,
            itl_target_s=self.itl_target_s,
            waited_s=min(waited_s, MAX_WAITED_S) if self.num_submits > 1 or waited_s > FRESH_S else 0.0,
        )

    def has_waited(self, seconds: float) -> None:
        """It has spent so much of its time in a queue, and goes to another one."""
        if self.deadline_s > 0:
            self.deadline_s = max(LEAST_WAIT_S, self.deadline_s - seconds)

    @property
    def num_tokens(self) -> int:
        """Tokens that an engine would have to compute."""
        return len(self.prompt) + len(self.emitted)
