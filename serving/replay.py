"""Replay state: all that is needed to continue one choice on another engine. Kept by the front end, because engines die.

Pure. Made by serving/processor.py, filled by serving/client.py as tokens arrive.
"""

from __future__ import annotations

from array import array

import numpy as np

from transport.messages import Submit
from trireme.params import RowParams


class Replay:
    """One choice of one prompt. `emitted` are the ids received so far; the seed and every limit are in `params`.

    Noise is a function of (seed, choice, absolute position), so a resubmitted choice draws what it would have drawn.
    """

    __slots__ = ("deadline_s", "emitted", "num_submits", "params", "priority", "prompt", "prompt_index", "salt")

    def __init__(
        self,
        prompt: np.ndarray,
        params: RowParams,
        *,
        prompt_index: int = 0,
        salt: bytes = b"",
        priority: int = 0,
        deadline_s: float = 0.0,
    ) -> None:
        self.prompt = prompt  # int32, never written to
        self.params = params
        self.prompt_index = prompt_index
        self.salt = salt
        self.priority = priority
        self.deadline_s = deadline_s
        self.emitted = array("i")
        self.num_submits = 0

    def submit(self, rid: int, ticket: int = 0) -> Submit:
        """The message that starts this choice, or continues it after the tokens emitted so far."""
        self.num_submits += 1
        prompt = self.prompt
        if self.emitted:
            prompt = np.concatenate([prompt, np.array(self.emitted, dtype=np.int32)])
        return Submit(
            rid=rid,
            prompt=prompt,
            params=self.params,
            salt=self.salt,
            ticket=ticket,
            priority=self.priority,
            deadline_s=self.deadline_s,
            num_replayed=len(self.emitted),
        )
