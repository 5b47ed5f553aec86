"""Sleep and wake of an engine: legal states and pending answers. Pure; EngineLoop carries out the orders.

awake -> falling -> asleep -> waking -> awake, and asleep -> falling -> asleep for a deeper sleep. An engine enters sleep only
without requests, and new work wakes it: no request is refused because of sleep. Level 1 offloads the weights to host memory,
level 2 drops them; both drop the KV cache.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from trireme.errors import EngineError
from trireme.sleep import LEVELS

Answer = Callable[[str], object]
"""Takes the error, "" for success."""


class SleepState:
    """`order(method, args)` is sent to the workers; call `done` when they have carried out the last one."""

    def __init__(self, order: Callable[[str, dict[str, Any]], object]) -> None:
        self.state: Literal["awake", "falling", "asleep", "waking"] = "awake"
        self.level = 0  # of the sleep, 0 while awake
        self._level_before = 0  # where the sleep being entered began
        self._order = order
        self._sleepers: list[Answer] = []
        self._wakers: list[Answer] = []
        self._is_wanted = False  # work arrived while entering sleep

    @property
    def is_awake(self) -> bool:
        return self.state == "awake"

    def sleep(self, level: int, num_requests: int, answer: Answer) -> bool:
        """Whether the workers were ordered to sleep now; the prefix cache is lost then."""
        if level not in LEVELS:
            answer(f"there is no sleep of level {level!r:.20}; 1 keeps the weights in the host's memory, 2 drops them")
        elif num_requests:
            answer(f"{num_requests} requests are under way; an engine sleeps only when it has none")
        elif self.state == "asleep" and level <= self.level:
            answer("")
        elif self.state in ("awake", "asleep"):
            self._level_before = self.level
            self.state, self.level = "falling", level
            self._sleepers.append(answer)
            self._order("sleep", {"level": level})
            return True
        else:
            answer(f"the engine is {self.state}; ask again when that is over")
        return False

    def wake(self, answer: Answer) -> None:
        """Answers when the engine computes again."""
        if self.is_awake:
            answer("")
            return
        self._wakers.append(answer)
        self.work_came()

    def work_came(self) -> None:
        """Work arrived: a sleeping engine wakes, one entering sleep wakes afterwards."""
        if self.state == "asleep":
            self.state = "waking"
            self._order("wake", {})
        elif self.state == "falling":
            self._is_wanted = True

    def done(self, error: str) -> None:
        """The workers have carried out the last order, or failed with `error`. Raises EngineError if the engine cannot wake."""
        was_falling = self.state == "falling"
        waiting = self._sleepers if was_falling else self._wakers
        if was_falling:
            self._sleepers = []
            self.level = self._level_before if error else self.level
            self.state = "asleep" if self.level else "awake"
        else:
            self._wakers = []
            self.state, self.level = "awake", 0
        for answer in waiting:
            answer(error)
        if error and not was_falling:
            raise EngineError(f"the engine cannot wake: {error}")
        self._go_on()

    def _go_on(self) -> None:
        """Starts the transition that was requested meanwhile, or answers those whose state is reached."""
        if self.state == "asleep" and self._is_wanted:
            self._is_wanted = False
            self.work_came()
        elif self.is_awake:
            self._is_wanted = False
            wakers, self._wakers = self._wakers, []
            for answer in wakers:
                answer("")
