"""Public names of Trireme, imported on first use: `from trireme import LLM, SamplingParams`.

Importing this package alone costs nothing; it must never import anything at the top.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    # for editors and type checkers only; the layers contract allows trireme to import nothing above it
    from trireme.config import EngineConfig
    from trireme.params import SamplingParams

_PLACES = {
    "LLM": "trireme.launch.api.llm",
    "AsyncLLM": "trireme.launch.api.llm",
    "Client": "trireme.launch.api.client",
    "AsyncClient": "trireme.launch.api.client",
    "Hosts": "trireme.launch.api.multi_server",
    "AsyncHosts": "trireme.launch.api.multi_server",
    "Patience": "trireme.transport.targets",
    "RequestOutput": "trireme.outputs",
    "OutputDelta": "trireme.outputs",
    "SamplingParams": "trireme.params",
    "EngineConfig": "trireme.config",
    "TriremeError": "trireme.errors",
    "ConfigError": "trireme.errors",
    "ModelError": "trireme.errors",
    "RequestError": "trireme.errors",
    "OverloadedError": "trireme.errors",
    "EngineError": "trireme.errors",
    "EngineDeadError": "trireme.errors",
}

__all__ = ["EngineConfig", "SamplingParams", "__version__", *_PLACES]


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module 'trireme' has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(_PLACES[name]), name)
    globals()[name] = value
    return value
