"""`LLM` and `AsyncLLM`: an engine owned by the caller, from Python, without HTTP. Engines and text side are those of the server.

from trireme import LLM, SamplingParams
with LLM("smollm2") as llm:
    print(llm.generate("The capital of France is", SamplingParams(max_tokens=8)).text)
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import msgspec

from trireme.config import EngineConfig
from trireme.errors import ConfigError
from trireme.launch.api.deployment import make_deployment
from trireme.launch.api.session import AsyncSession, Session
from trireme.launch.api.view import ProgressView
from trireme.resolve import prepare
from trireme.settings import Loaded, load
from trireme.targets import OFF


class AsyncLLM(AsyncSession):
    """`async with AsyncLLM("smollm2", tp=2) as llm: ...`

    Keyword arguments are the settings of `trireme serve --help all`, spelled with underscores; `config` is a YAML file of
    them, but for `queue_timeout` (none) and `itl_target` (off), which are for servers: set them where streams are read. A whole
    EngineConfig may replace all these. Raises ConfigError and ModelError when made, EngineError
    and others from requests.
    """

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        config: str | Path | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        launched = time.monotonic()
        if not isinstance(model, EngineConfig):
            model = patient(load(settings if model is None else {"model": str(model), **settings}, file=config))
        elif settings or config is not None:
            raise ConfigError("an EngineConfig is complete: no further settings can be given beside it")
        prepared = prepare(model)
        view = ProgressView(progress)
        deployment = make_deployment(prepared.config, view.on_progress)
        super().__init__(prepared.config, prepared.decisions, deployment, view, launched=launched)


def patient(loaded: Loaded) -> EngineConfig:
    """Disables the queue's time limit and the target between tokens unless somebody set them: no client waits for an offline batch,
    nor reads its streams."""
    config, wanted = loaded.config, {"queue_timeout": 0.0, "itl_target": OFF}
    changes = {name: value for name, value in wanted.items() if f"scheduler.{name}" not in loaded.sources}
    return msgspec.structs.replace(config, scheduler=msgspec.structs.replace(config.scheduler, **changes))


class LLM(Session):
    """The blocking twin of AsyncLLM, with the same arguments, for scripts and notebooks. Starts on construction."""

    def __init__(
        self,
        model: str | Path | EngineConfig | None = None,
        *,
        config: str | Path | None = None,
        progress: bool | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(AsyncLLM(model, config=config, progress=progress, **settings))
