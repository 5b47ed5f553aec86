"""Imports the compiled kernels, with an error that says how to build them. Called by models and workers only."""

from __future__ import annotations

import importlib
from types import ModuleType

from trireme.errors import ConfigError


def load_native() -> ModuleType:
    """The extension module. Raises ConfigError if it is not built or does not load on this machine."""
    try:
        return importlib.import_module("trireme.models._native")
    except ImportError as error:
        raise ConfigError(
            f"the native kernels (trireme.models._native) cannot be loaded: {error}",
            hint="make native   (or: python setup.py build_ext --inplace)",
        ) from error


def find_native() -> ModuleType | None:
    """The extension module, or None if it does not load, for callers with a fallback."""
    try:
        return load_native()
    except ConfigError:
        return None
