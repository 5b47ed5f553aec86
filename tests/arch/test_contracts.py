"""What holds the house together: import contracts, no pickle, one docstring per file, torch only where tensors are."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("trireme", "transport", "engine_core", "coordinator", "workers", "models", "serving", "launch")
SOURCES = sorted(path for package in PACKAGES for path in (ROOT / package).rglob("*.py"))
TOOLS = [ROOT / "setup.py", *sorted((ROOT / "scripts").glob("*.py"))]
BANNED_IMPORTS = {"pickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "httpx", "cPickle"}
BANNED_CALLS = {"eval", "exec", "compile", "__import__"}
BANNED_METHODS = {"send_pyobj", "recv_pyobj", "system", "popen"}
BANNED_NAMES = re.compile(r"(^|_)(utils?|helpers?|misc|common|manager|handler|wrapper)(_|$)")
# Modules whose import is the start of a process: workers see tensors only where their model has no native stage.
TORCH_FREE = (
    "trireme",
    "trireme.transport.sockets.names",
    "trireme.transport.process.boot",
    "trireme.launch.cli",
    "trireme.launch.console",
    "trireme.launch.processes.parts",
    "trireme.launch.commands.serve",
    "trireme.launch.processes.supervisor",
    "trireme.launch.api.llm",
    "trireme.launch.commands.chat",
    "trireme.launch.bench.serve",
    "trireme.coordinator.main",
    "trireme.engine_core.main",
    "trireme.workers.main",
    "trireme.workers.cpu.worker",
    "trireme.models.cpu.native_stage",
    "trireme.serving.main",
)

# Where an error of any kind ends something smaller than the program, and nothing else hears of it.
SWALLOWING = {
    "transport/process/boot.py": 1,
    "transport/step_futures.py": 1,
    "engine_core/executor/inproc.py": 1,
    "launch/api/deployment.py": 1,
    "models/cuda/attention/registry.py": 1,
}


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def trees() -> list[tuple[Path, ast.Module]]:
    return [(path, ast.parse(path.read_text())) for path in SOURCES]


def test_import_contracts():
    """DESIGN: who may import whom, as written in pyproject.toml."""
    command = [sys.executable, "-c", "from importlinter.cli import lint_imports_command as main; main()"]
    checked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=110)
    assert checked.returncode == 0, checked.stdout[-4000:] + checked.stderr[-2000:]
    assert "0 broken" in checked.stdout


def test_rich_only_in_the_console():
    """The contract cannot name `launch but one file`, so the other half of it is here."""
    for path, tree in trees():
        if relative(path) != "launch/console.py":
            assert "rich" not in imported(tree), path


def imported(tree: ast.Module) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names.add((node.module or "").split(".")[0])
    return names


@pytest.mark.parametrize("path", SOURCES + TOOLS, ids=relative)
def test_file_starts_with_what_it_owns(path):
    """STYLE 5.5; ASCII source (box drawing and letters of the domain in docstrings and tables excepted)."""
    source = path.read_text()
    if path.name == "__init__.py" and not source.strip():
        return
    doc = ast.get_docstring(ast.parse(source))
    assert doc, "a docstring says what the file owns"
    assert len(doc.split(".")[0]) > 10


@pytest.mark.parametrize("path", SOURCES, ids=relative)
def test_nothing_is_unpickled_evaluated_or_shelled(path):
    """S1, S7, S9: no code and no object graph from outside, anywhere."""
    tree = ast.parse(path.read_text())
    assert not imported(tree) & BANNED_IMPORTS
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            assert name not in BANNED_CALLS, f"line {node.lineno}: {name}()"
            if isinstance(node.func, ast.Attribute):
                owner = node.func.value.id if isinstance(node.func.value, ast.Name) else ""
                assert node.func.attr not in BANNED_METHODS, f"line {node.lineno}: {node.func.attr}"
                assert (owner, node.func.attr) not in {("torch", "load"), ("np", "loads"), ("yaml", "load")}
            for keyword in node.keywords:
                on = isinstance(keyword.value, ast.Constant) and keyword.value.value is True
                assert not (on and keyword.arg in ("shell", "allow_pickle", "trust_remote_code")), node.lineno


def test_the_environment_is_read_in_settings_only():
    for path, tree in trees():
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv", "environb"):
                assert relative(path) == "trireme/settings.py", f"{path}:{node.lineno}"


def test_names_say_something():
    """STYLE 5.2: a thing that cannot be named has not been understood."""
    for path, tree in trees():
        assert not BANNED_NAMES.search(path.stem), path
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                words = re.sub(r"(?<!^)(?=[A-Z])", "_", node.name).lower()
                assert not BANNED_NAMES.search(words), f"{path}: {node.name}"


def test_errors_are_swallowed_only_where_something_ends():
    """STYLE 5.4: `except Exception` without raising again sits where a process, a request or a row ends, known here."""
    found: dict[str, int] = {}
    for path, tree in trees():
        for node in ast.walk(tree) if path.name != "main.py" else ():
            if isinstance(node, ast.ExceptHandler) and not any(isinstance(n, ast.Raise) for n in ast.walk(node)):
                caught = ast.unparse(node.type) if node.type else "bare"
                if caught in ("bare", "Exception", "BaseException"):
                    found[relative(path)] = found.get(relative(path), 0) + 1
    assert found == SWALLOWING


def run_python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("module", TORCH_FREE)
def test_torch_is_absent_until_something_computes_in_it(module):
    code = f"import {module}, sys; print(sorted(m for m in sys.modules if m in ('torch', 'triton', 'transformers')))"
    assert run_python(code).strip() == "[]"


def test_importing_trireme_imports_nothing_else():
    code = "import sys; known = {*sys.stdlib_module_names, *sys.modules}; import trireme; "
    code += "print([m for m in sys.modules if m.split('.')[0] not in known])"
    assert run_python(code).strip() == "['trireme']"


def test_public_names_are_there():
    import trireme

    for name in trireme.__all__:
        assert getattr(trireme, name) is not None
    with pytest.raises(AttributeError):
        _ = trireme.Nothing
