"""Users without a name and a home directory, as containers have them: nothing that looks for files may fail on them."""

from __future__ import annotations

import hashlib
import os
import pwd
import tempfile
from pathlib import Path
from typing import NoReturn

import pytest

from tests.models.tiny import make_stub
from trireme.errors import ModelError
from trireme.launch.commands.doctor import examine
from trireme.machine.device import read_device
from trireme.model.files import PACKAGED, Packaged, find_model
from trireme.serving.text.tokens import load_tokenizer

CONTENT = b"GGUF and the rest"


def nobody(user: int) -> NoReturn:
    raise KeyError(f"getpwuid(): uid not found: {user}")


@pytest.fixture
def in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in two packages, `split`, and the directory for temporary files."""
    for i, part in enumerate((CONTENT[:5], CONTENT[5:])):
        package = tmp_path / f"split_part{i}"
        package.mkdir()
        (package / "__init__.py").touch()
        (package / "x.part").write_bytes(part)
    monkeypatch.syspath_prepend(tmp_path)
    parts = tuple((f"split_part{i}", "x.part") for i in range(2))
    monkeypatch.setitem(PACKAGED, "split", Packaged("split", parts, "x.gguf", hashlib.sha256(CONTENT).hexdigest()))
    monkeypatch.delitem(PACKAGED, "gemma3-270m")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    return temporary


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch) -> None:
    """HOME is not set and the system knows no user of this number."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", nobody)


def test_a_user_without_home_joins_parts_beside_temporary_files(homeless: None, in_parts: Path) -> None:
    path = find_model("split").path
    assert path.read_bytes() == CONTENT
    assert path == in_parts / f"trireme.{os.getuid()}" / "models" / "x.gguf"
    assert path.parent.stat().st_mode & 0o777 == 0o700
    before = path.stat().st_mtime_ns
    assert find_model("split").path.stat().st_mtime_ns == before


def test_the_doctor_sees_a_user_without_home(homeless: None, in_parts: Path) -> None:
    states = {finding.what: finding.state for finding in examine(read_device())}
    assert states["model split"] == "ok"
    assert "fail" not in states.values()


def test_a_home_that_cannot_be_written_is_passed_over(in_parts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (in_parts / "file").touch()
    monkeypatch.setenv("HOME", str(in_parts / "file"))  # below a file nothing can be made, by root either
    assert find_model("split").path.is_relative_to(in_parts / f"trireme.{os.getuid()}")


def test_a_directory_that_others_could_write_is_not_used(homeless: None, in_parts: Path) -> None:
    place = in_parts / f"trireme.{os.getuid()}" / "models"
    place.mkdir(parents=True)
    place.chmod(0o777)
    (place / "x.gguf").write_bytes(CONTENT[::-1])
    with pytest.raises(ModelError, match="no directory to join the parts of x.gguf in") as caught:
        find_model("split")
    assert "HOME" in caught.value.hint


def test_a_path_with_a_home_that_is_not_there(homeless: None, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="~/x.gguf: this user has no home directory"):
        find_model("~/x.gguf")
    files = find_model(make_stub(tmp_path))
    for options in ({"tokenizer": "~/t"}, {"chat_template": "~/t.jinja"}):
        with pytest.raises(ModelError, match="no home directory"):
            load_tokenizer(files, **options)
