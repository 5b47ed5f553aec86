"""`python -P -m tests.procs.supervised DIRECTORY DP FRONTS`: a supervisor over the fakes, printing its events as lines."""

from __future__ import annotations

import sys
from pathlib import Path

from trireme.config import EngineConfig, LaunchConfig, ModelConfig, ParallelConfig, ServingConfig
from trireme.launch.processes.events import AllReady, Event, Stopped
from trireme.launch.processes.parts import Modules
from trireme.launch.processes.restarts import RestartLimits
from trireme.launch.processes.supervisor import Supervisor, SupervisorTimeouts

MODULES = Modules(engine="tests.procs.fake_engine", front="tests.procs.fake_front")
TIMING = SupervisorTimeouts(
    restarts=RestartLimits(first_s=0.1, longest_s=0.4, most=3, window_s=60.0),
    stuck_s=2.5,
    cleanup_s=1.0,
    leave_s=2.0,
    undying_s=1.0,
    close_s=3.0,
)


def config_for(
    directory: Path, dp: int, fronts: int, port: int = 0, *, transport: str = "ipc", start_timeout: float = 60.0
) -> EngineConfig:
    return EngineConfig(
        model=ModelConfig(model=str(directory)),
        parallel=ParallelConfig(dp=dp),
        serving=ServingConfig(port=port, api_servers=fronts, drain_timeout=1.0, drain_notice=0.25),
        launch=LaunchConfig(transport=transport, start_timeout=start_timeout),  # type: ignore[arg-type]
    )


def show(event: Event) -> None:
    match event:
        case AllReady():
            print(f"ready {event.address[1] if event.address else 0}", flush=True)
        case Stopped():
            print(f"stopped {event.exit_code} {event.failed.error if event.failed else ''}", flush=True)
        case _:
            print(type(event).__name__, flush=True)


if __name__ == "__main__":
    directory, dp, fronts, port = Path(sys.argv[1]), *map(int, sys.argv[2:5])
    supervisor = Supervisor(config_for(directory, dp, fronts, port), show, modules=MODULES, timing=TIMING)
    sys.exit(supervisor.run())
