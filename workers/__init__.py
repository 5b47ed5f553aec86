"""What computes: one worker per device. Importing the package sets aside the part of torch's import that no worker uses.

`import torch` spends a fifth of its time on shape rules for tensors without data (torch.compile, fake tensors). On a machine
without GPU nothing here traces, so that module is executed when somebody asks for a name in it, which is never.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

DEFERRED = "torch._meta_registrations"


class _Deferring(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds one module as the ordinary finder does, but executes it at the first use of a name in it."""

    def __init__(self) -> None:
        self._real: importlib.abc.Loader | None = None

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != DEFERRED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is not None and spec.loader is not None:
            self._real, spec.loader = spec.loader, self
        return spec

    def exec_module(self, module: ModuleType) -> None:
        def load(name: str) -> Any:
            if name.startswith("__") or self._real is None:
                raise AttributeError(f"module {DEFERRED} has no attribute {name}")
            real, self._real = self._real, None
            del module.__dict__["__getattr__"]
            real.exec_module(module)
            return getattr(module, name)

        module.__dict__["__getattr__"] = load


if "torch" not in sys.modules and not any(Path("/dev").glob("nvidia[0-9]*")):
    sys.meta_path.insert(0, _Deferring())
