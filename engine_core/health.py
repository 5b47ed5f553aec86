"""Whether an engine makes progress. Tells its frontends when that changes, ends an engine whose step never ends, and audits one
that has become idle.

Used by EngineLoop on every iteration. Judges by steps (engine_core/stall.py) and by what the system says of the workers.
"""

from __future__ import annotations

import logging

from trireme.engine_core.core import EngineCore
from trireme.engine_core.executor.base import Executor
from trireme.engine_core.frontends import FrontServer
from trireme.engine_core.lifecycle.stepping import Stepping
from trireme.engine_core.stall import StallWatch
from trireme.errors import EngineError
from trireme.topology.lockstep import is_pause
from trireme.transport.wire.messages import Pong

log = logging.getLogger("trireme.engine")

YOUNG_S = 0.1  # starvation is not checked for steps younger than this
HALT_S = 0.5  # between checks for stopped or starved workers


class HealthCheck:
    """A step that takes more than `step_timeout` seconds, and three times its usual time, is given up."""

    def __init__(
        self, core: EngineCore, executor: Executor, server: FrontServer, stepping: Stepping, step_timeout: float
    ) -> None:
        self._core = core
        self._executor = executor
        self._server = server
        self._stepping = stepping
        self._watch = StallWatch(core.step_times, step_timeout, most_tokens=stepping.most_tokens)
        self._halted, self._next_halt = "", 0.0
        self._was_idle = True

    def turn(self, now: float) -> None:
        """Call first in every iteration of the loop."""
        self._watch.turn(now)

    def look(self, now: float, *, is_awake: bool) -> None:
        """Updates the stall state. Raises EngineError when a step never ends, IntegrityError when an engine that has become idle
        still holds something."""
        step, starved_s = self._core.oldest_step(), 0.0
        if now >= self._next_halt:
            self._halted, self._next_halt = self._executor.halted(), now + HALT_S
            if step is not None and now - step[1] > YOUNG_S:
                starved_s = self._executor.starved_s()
        has_work = self._stepping.has_step and is_awake
        self._watch.look(now, step, has_work=has_work, halted=self._halted, starved_s=starved_s)
        stalled = self._watch.stalled or self._stepping.stall_reason(now)
        if bool(stalled) != bool(self._server.stalled):
            self._tell(stalled)
        if self._watch.stuck:
            raise EngineError(self._watch.stuck, hint="--step-timeout gives steps more time")
        is_idle = self._core.is_idle
        if is_idle and not self._was_idle:
            self._core.check_idle()
        self._was_idle = is_idle

    def _tell(self, stalled: str) -> None:
        """Tells every frontend at once rather than at its next Ping."""
        level = logging.INFO if is_pause(stalled or self._server.stalled) else logging.WARNING
        log.log(level, "no progress: %s" if stalled else "progress again%s", stalled)
        self._server.stalled = stalled
        self._server.broadcast(Pong(0, self._server.progress, stalled), role="front")
