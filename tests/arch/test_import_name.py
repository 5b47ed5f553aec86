"""`trireme` is the only name this project imports under: in a checkout, beside folders of the same names, and in a wheel."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LINKED = ("coordinator", "engine_core", "launch", "models", "serving", "transport", "workers")
SHADOWS = (*LINKED, "tests", "scripts")


def python_files() -> list[Path]:
    folders = (*LINKED, "trireme", "tests", "scripts")
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


@pytest.mark.parametrize("folder", LINKED)
def test_trireme_links_to_the_folder(folder: str) -> None:
    link = ROOT / "trireme" / folder
    assert link.is_symlink()
    assert os.readlink(link) == f"../{folder}"


def test_no_file_imports_a_folder_by_its_bare_name() -> None:
    for path in python_files():
        for node in ast.walk(ast.parse(path.read_text())):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names = [node.module or ""]
            assert not {name.split(".")[0] for name in names} & set(LINKED), f"{path}:{node.lineno}"


def shadowed(folder: Path) -> Path:
    """A folder as a user may have it: packages of his own under all of our folders' names, each ending the program if imported."""
    for name in SHADOWS:
        (folder / name).mkdir()
        (folder / name / "__init__.py").write_text(f"raise SystemExit('imported the folder {name} of the user')\n")
    return folder


def test_a_script_beside_folders_of_the_same_names_runs(tmp_path: Path) -> None:
    """Processes and all: two engines behind the coordinator, each in a process of its own."""
    from tests.e2e.deployment import python_path
    from tests.models.tiny import make_stub

    script = shadowed(tmp_path) / "script.py"
    (tmp_path / "stub").mkdir()
    script.write_text(
        "from trireme import LLM, SamplingParams\n"
        f"with LLM({str(make_stub(tmp_path / 'stub'))!r}, worker='fake', dp=2) as llm:\n"
        "    print(len(llm.generate([[5, 6, 7]] * 4, SamplingParams(max_tokens=4, ignore_eos=True))))\n"
    )
    env = {**os.environ, "PYTHONPATH": python_path()}
    done = subprocess.run([sys.executable, script], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["4"], done.stderr


@pytest.mark.timeout(400)
def test_the_wheel_holds_one_package(tmp_path: Path) -> None:
    """Every package and extension under trireme/, no tests, and nothing beside it; the command starts from it alone."""
    build = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "-q",
        "--no-deps",
        "--no-build-isolation",
        "-w",
        str(tmp_path),
        str(ROOT),
    ]
    subprocess.run(build, check=True, timeout=300)
    (wheel,) = tmp_path.glob("trireme-*.whl")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(site)
    assert {name.split("/")[0] for name in names} == {"trireme", wheel.name.rsplit("-", 3)[0] + ".dist-info"}
    modules = {f"trireme/{path.relative_to(ROOT)}" for folder in LINKED for path in (ROOT / folder).rglob("*.py")}
    assert modules <= names
    extensions = {name.split(".")[0] for name in names if name.endswith(".so")}
    assert {"trireme/models/_native", "trireme/serving/_native"} <= extensions
    code = "import trireme, trireme.launch.cli as cli; print(trireme.__file__); cli.main(['version'])"
    env = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.startswith(str(site)), done.stdout + done.stderr
