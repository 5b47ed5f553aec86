"""Locations of a user's files, also without a user entry: containers run under uids that have no name and no home directory."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

from trireme.errors import ModelError


def expanded(path: str | Path) -> Path:
    """A path as typed, with `~` expanded. Raises ModelError where there is no such home directory."""
    try:
        return Path(path).expanduser()
    except RuntimeError as error:
        raise ModelError(
            f"{path}: this user has no home directory", hint="give the path without ~, or set HOME"
        ) from error


def cache_directories() -> list[Path]:
    """Candidate model caches: below the home directory, then a private directory under the system's temporary one. They need not
    exist."""
    places = [Path(tempfile.gettempdir()) / f"trireme.{os.getuid()}" / "models"]
    try:
        return [Path.home() / ".cache" / "trireme" / "models", *places]
    except RuntimeError:
        return places


def usable(directory: Path) -> bool:
    """Whether files can be kept in the directory, which is created with mode 0700 if needed; False where others could write."""
    try:
        directory.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        directory.mkdir(exist_ok=True, mode=0o700)
        return all(_is_own(place) for place in (directory.parent, directory)) and os.access(directory, os.W_OK)
    except OSError:
        return False


def _is_own(directory: Path) -> bool:
    found = directory.lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & stat.S_IWOTH
