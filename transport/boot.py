"""The channel between a parent process and a child it starts: birth (Boot), progress, readiness, failure, drain, death.

A child module defines `main(channel: BootChannel) -> None` and nothing more; `spawn("engine_core.main", boot)` runs it in
a new process through transport/child.py. Neither side can outlive its duty: a child is killed when its parent ends.
"""

from __future__ import annotations

from typing import Any, NoReturn

from transport.messages import Boot, Drain, Failed, Progress, Ready


class Child:
    """Parent's end. A Source for Poller: readable when there are reports or the child died."""

    name: str
    boot: Boot
    pid: int
    is_ready: bool  # a Ready was received

    def receive(self) -> list[Progress | Ready | Failed]:
        """Reports since the last call, never blocking. When the child is dead the list ends with a Failed: its own, or
        one that says how it died (signal, exit code). `is_dead` is then True. A clean exit (code 0) gives no Failed."""
        raise NotImplementedError

    @property
    def is_dead(self) -> bool:
        raise NotImplementedError

    @property
    def exit_code(self) -> int | None:
        """Exit code, negative signal number, or None while alive."""
        raise NotImplementedError

    def drain(self, deadline_s: float) -> None:
        """Asks the child to finish what it has and leave."""
        raise NotImplementedError

    def kill(self) -> None:
        """SIGKILL, and reaps."""
        raise NotImplementedError

    def wait(self, timeout_s: float) -> bool:
        """True when the child has ended within `timeout_s`."""
        raise NotImplementedError

    def poll_target(self) -> Any:
        raise NotImplementedError

    def tick(self, now: float) -> float:
        raise NotImplementedError

    def close(self) -> None:
        """Closes the channel (which kills a child that still lives)."""
        raise NotImplementedError


def spawn(module: str, boot: Boot, *, pass_fds: tuple[int, ...] = ()) -> Child:
    """Starts `python transport/child.py module name`; fds in `pass_fds` keep their numbers. stdout of the child is our stderr.

    Call from the main thread where possible: only then the kernel itself ties the child's life to ours.
    """
    raise NotImplementedError


class BootChannel:
    """Child's end, handed to `main`. Reports may be sent from any thread. A Source for Poller: readable when a Drain came.

    SIGINT and SIGTERM are ignored in a child: its parent decides, through Drain and SIGKILL.
    """

    boot: Boot

    def progress(self, phase: str, done: int, total: int) -> None:
        """Reports start-up progress (at most 20 a second reach the parent; the last one of a phase always does)."""
        raise NotImplementedError

    def ready(
        self,
        facts: dict[str, Any] | None = None,
        phases: dict[str, float] | None = None,
        decisions: list[tuple[str, str, str]] | None = None,
    ) -> None:
        raise NotImplementedError

    def beat(self, progress: int) -> None:
        """Called by the main loop on every turn (cheap; sends once a second). A child that has beaten once and then falls
        silent for longer than the parent allows is killed and restarted."""
        raise NotImplementedError

    def forward(self, report: Progress) -> None:
        """Passes a grandchild's progress on."""
        raise NotImplementedError

    def fail(self, error: BaseException | Failed) -> NoReturn:
        """Reports the error (or a grandchild's Failed as it is) and ends this process at once."""
        raise NotImplementedError

    def receive(self) -> list[Drain]:
        """Drain requests since the last call, never blocking."""
        raise NotImplementedError

    def fileno(self) -> int:
        """For asyncio's add_reader."""
        raise NotImplementedError

    def poll_target(self) -> int:
        raise NotImplementedError

    def tick(self, now: float) -> float:
        raise NotImplementedError
