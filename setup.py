"""Builds csrc into the extensions models._native (kernels), serving._native (csrc/text) and, where nvcc and a CUDA torch are,
models._cuda (csrc/cuda); `cuda_compile` only compiles the last. The rest is in pyproject.toml. Each object is compiled only
when its source, a header in its depfile or its command changed; a file lock keeps two builds apart. Kernel variants get their
instruction set from the file name: *_avx2.cpp, *_avxvnni.cpp, *_avx512.cpp, *_amx.cpp, *_hopper.cu. No torch headers are used.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import os
import platform
import re
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from setuptools import Command, Extension, setup
from setuptools.command.build import build
from setuptools.command.build_ext import build_ext

ROOT = Path(__file__).resolve().parent
CSRC = ROOT / "csrc"
TEXT = CSRC / "text"
CUDA = CSRC / "cuda"
CUDA_BINDINGS = sorted((CSRC / "bind").glob("cuda*.cpp"))
TENSOR_VIEW = CSRC / "bind" / "tensor_view.cpp"  # of both extensions with kernels
WORK = ROOT / "build" / "native"
IS_X86 = platform.machine().lower() in ("x86_64", "amd64")
# No contraction: a*b+c is one rounding only where a kernel asks for it, so that results do not depend on the compiler.
COMMON_FLAGS = ["-O3", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-fno-math-errno", "-pthread"]
WARNING_FLAGS = ["-Wall", "-Wextra", "-Wno-psabi"]
AVX2_FLAGS = ["-mavx2", "-mfma", "-mf16c", "-mbmi", "-mbmi2"]
AVX512_FLAGS = [
    *AVX2_FLAGS,
    *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mavx512vnni", "-mprefer-vector-width=512"),
    "-Wno-maybe-uninitialized",  # gcc 12 reports its own intrinsics
    "-Wno-uninitialized",
]
ISA_FLAGS = {
    "_avx2": AVX2_FLAGS,
    "_avxvnni": [*AVX2_FLAGS, "-mavxvnni"],
    "_avx512": AVX512_FLAGS,
    "_amx": [*AVX512_FLAGS, "-mamx-tile", "-mamx-int8"],
}
CUDA_FLAGS = ["-O3", "-std=c++17", "-Xcompiler=-fPIC,-fvisibility=hidden", "--expt-relaxed-constexpr", "-lineinfo"]
CUDA_ARCHS = ("80", "90")  # where no card says otherwise; the environment's CUDA_ARCHS names others, as in "80;90"


def find_pybind11_include() -> str:
    """Headers of pybind11: the package if importable, else the copy that torch carries."""
    if importlib.util.find_spec("pybind11") is not None:
        import pybind11

        return str(pybind11.get_include())
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise SystemExit("error: neither pybind11 nor torch is importable\n  try   pip install pybind11")
    return str(Path(spec.origin).parent / "include")


def find_nvcc() -> str | None:
    """Path of nvcc, None without one."""
    return shutil.which("nvcc") or shutil.which("/usr/local/cuda/bin/nvcc")


def has_cuda_torch() -> bool:
    """Whether the torch at hand was built for CUDA; torch itself is not imported."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return False
    version = (Path(spec.origin).parent / "version.py").read_text()
    return re.search(r"^cuda\b.*=\s*['\"]", version, re.MULTILINE) is not None


def find_cuda_archs() -> list[str]:
    """Compute capabilities to compile for, as "90": what CUDA_ARCHS asks for, else those of the cards here, else CUDA_ARCHS."""
    asked = re.findall(r"\d+a?", os.environ.get("CUDA_ARCHS", "").replace(".", ""))
    if asked:
        return sorted(set(asked))
    query = ["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"]
    if shutil.which(query[0]):
        found = subprocess.run(query, capture_output=True, text=True)
        cards = re.findall(r"^(\d+)\.(\d+)\s*$", found.stdout, re.MULTILINE) if found.returncode == 0 else []
        if cards:
            return sorted({major + minor for major, minor in cards})
    return list(CUDA_ARCHS)


def arch_flags(source: Path) -> list[str]:
    """Machine code for each capability, and portable code of the newest for cards that come later; for *_hopper.cu all that the one
    kind of card has that it is for."""
    archs = find_cuda_archs()
    if source.stem.endswith("_hopper") and any(arch.startswith("90") for arch in archs):
        return ["-gencode=arch=compute_90a,code=sm_90a", "-DTRIREME_HOPPER"]
    flags = [f"-gencode=arch=compute_{arch},code=sm_{arch}" for arch in archs]
    return flags if archs[-1].endswith("a") else [*flags, f"-gencode=arch=compute_{archs[-1]},code=compute_{archs[-1]}"]


def check_flags(source: Path) -> list[str]:
    """Portable code of the newest capability alone, with what `arch_flags` defines."""
    newest = find_cuda_archs()[-1]
    if source.stem.endswith("_hopper") and newest.startswith("90"):
        return ["-arch=compute_90a", "-DTRIREME_HOPPER"]
    return [f"-arch=compute_{newest}"]


def replace_file(target: Path, write: Callable[[Path], None]) -> None:
    """Writes beside the target and renames, so that processes using the old file keep it."""
    target.parent.mkdir(parents=True, exist_ok=True)
    fresh = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        write(fresh)
        os.replace(fresh, target)
    finally:
        fresh.unlink(missing_ok=True)


def isa_flags(source: Path) -> list[str]:
    for suffix, flags in ISA_FLAGS.items():
        if source.stem.endswith(suffix):
            return flags
    return []


def find_sources(extension: str) -> list[Path]:
    """The sources of an extension; kernel variants for x86 only there."""
    if extension == "trireme.serving._native":
        return sorted(TEXT.glob("*.cpp"))
    if extension == "trireme.models._cuda":
        return [*CUDA_BINDINGS, TENSOR_VIEW, *sorted(CUDA.rglob("*.cu"))]
    kernels = [path for path in sorted(CSRC.rglob("*.cpp")) if TEXT not in path.parents and path not in CUDA_BINDINGS]
    return [path for path in kernels if IS_X86 or not isa_flags(path)]


class NativeBuild:
    """One build of `extension` into `target`, or of its objects alone without one; they are kept under `work_dir`.

    `only_checks`: no machine code is made, CUDA sources become portable code of the newest capability and others are parsed, in
    less than half of the time.
    """

    def __init__(
        self, extension: str, work_dir: Path, target: Path | None, compiler: str, *, only_checks: bool = False
    ) -> None:
        self.extension = extension
        self.work_dir = work_dir
        self.target = target
        self.compiler = compiler
        self.only_checks = only_checks
        self.nvcc = find_nvcc() if extension == "trireme.models._cuda" else None
        self.cuda_flags = [*CUDA_FLAGS, f"-ccbin={compiler}"] if self.nvcc else []
        self.includes = [f"-I{CSRC}", f"-I{find_pybind11_include()}", f"-I{sysconfig.get_path('include')}"]

    def run(self) -> None:
        self.work_dir.mkdir(parents=True, exist_ok=True)
        with open(self.work_dir / "lock", "w") as lock:  # one for all extensions: they share an object
            fcntl.flock(lock, fcntl.LOCK_EX)
            self._build()

    def _build(self) -> None:
        sources = find_sources(self.extension)
        stale = [source for source in sources if self._is_stale(source)]
        # A future per file; the first failure is raised after all have printed theirs.
        with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
            failed = [name for name in pool.map(self._compile, stale) if name]
        if failed:
            raise SystemExit(
                f"error: {len(failed)} file(s) of the native extension did not compile: {', '.join(failed)}"
            )
        if self.target is not None:
            self._link_if_stale([self._object(source) for source in sources], self.target)

    def _link_if_stale(self, objects: list[Path], target: Path) -> None:
        newest = max(path.stat().st_mtime_ns for path in objects)
        listing = self.work_dir / f"{self.extension}.objects.txt"
        names = "\n".join(map(str, objects))
        is_same_set = listing.exists() and listing.read_text() == names
        if not (target.exists() and is_same_set and target.stat().st_mtime_ns >= newest):
            print(f"linking {target.name}", flush=True)
            replace_file(target, lambda fresh: self._link(objects, fresh))
            listing.write_text(names)

    def _object(self, source: Path) -> Path:
        suffix = ".checked" if self.only_checks else ".o"
        return self.work_dir / (str(source.relative_to(CSRC)).replace("/", "__") + suffix)

    def _command(self, source: Path) -> list[str]:
        out = self._object(source)
        dep = ["-MMD", "-MF", f"{out}.d"]
        if source.suffix == ".cu":
            assert self.nvcc is not None
            return [
                self.nvcc,
                *self.cuda_flags,
                *(["-ptx", *check_flags(source)] if self.only_checks else ["-c", *arch_flags(source)]),
                *self.includes,
                *dep,
                str(source),
                "-o",
                str(out),
            ]
        flags = [*COMMON_FLAGS, *WARNING_FLAGS, *isa_flags(source)]
        if self.only_checks:
            return [self.compiler, *flags, *self.includes, *dep, "-fsyntax-only", str(source)]
        return [self.compiler, *flags, *self.includes, *dep, "-c", str(source), "-o", str(out)]

    def _stamp(self, source: Path) -> str:
        return hashlib.sha256("\0".join(self._command(source)).encode()).hexdigest()

    def _is_stale(self, source: Path) -> bool:
        out = self._object(source)
        dep, stamp = Path(f"{out}.d"), Path(f"{out}.cmd")
        if not (out.exists() and dep.exists() and stamp.exists()) or stamp.read_text() != self._stamp(source):
            return True
        built = out.stat().st_mtime_ns
        _, _, needs = dep.read_text().partition(":")
        paths = [Path(word) for word in needs.replace("\\\n", " ").split()]
        return any(not path.exists() or path.stat().st_mtime_ns >= built for path in paths)

    def _compile(self, source: Path) -> str:
        """Compiles one file; returns its name if that failed."""
        out = self._object(source)
        print(f"compiling {source.relative_to(ROOT)}", flush=True)
        # The object counts as old as the start of its compile, so a file edited meanwhile is stale afterwards.
        started_ns = time.time_ns()
        result = subprocess.run(self._command(source), capture_output=True, text=True)
        sys.stdout.write(result.stdout + result.stderr)
        if result.returncode != 0:
            out.unlink(missing_ok=True)
            return str(source.relative_to(ROOT))
        out.touch()  # where the sources are only checked, there may be none
        os.utime(out, ns=(started_ns, started_ns))
        Path(f"{out}.cmd").write_text(self._stamp(source))
        return ""

    def _link(self, objects: list[Path], out: Path) -> None:
        command = [self.compiler, "-shared", "-pthread", "-Wl,-O1", *map(str, objects), "-o", str(out)]
        if self.nvcc:  # knows where its libraries are; torch brings the same runtime along
            command = [
                self.nvcc,
                "-shared",
                "-cudart=shared",
                f"-ccbin={self.compiler}",
                *map(str, objects),
                "-o",
                str(out),
            ]
        if subprocess.run(command).returncode != 0:
            raise SystemExit("error: linking the native extension failed (the linker's message is above)")


def find_compiler(named: str = "g++") -> str:
    compiler = shutil.which(named) or shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise SystemExit("error: no C++ compiler found\n  try   apt-get install g++")
    return compiler


class BuildExt(build_ext):
    """setuptools' command, with the compiling done by NativeBuild."""

    def build_extension(self, ext: Extension) -> None:
        target = Path(self.get_ext_fullpath(ext.name))
        command = getattr(self.compiler, "compiler_cxx", None) or ["g++"]
        NativeBuild(ext.name, WORK, target.resolve(), find_compiler(command[0])).run()

    def copy_extensions_to_source(self) -> None:
        for ext in self.extensions:
            filename = self.get_ext_filename(ext.name)
            built, target = ROOT / self.build_lib / filename, ROOT / filename
            if not target.exists() or target.stat().st_mtime_ns < built.stat().st_mtime_ns:
                replace_file(target, lambda fresh, built=built: shutil.copy2(built, fresh))  # type: ignore[misc]


class Build(build):
    """setuptools' command over an empty folder, so that no file of an earlier build gets into a wheel."""

    def run(self) -> None:
        shutil.rmtree(self.build_lib, ignore_errors=True)
        super().run()


class CompileCuda(Command):
    """Compiles models._cuda without linking it, so that a machine without a card can tell whether the sources are sound."""

    user_options = [("check", None, "make no machine code, only portable code of the newest capability")]
    boolean_options = ["check"]

    def initialize_options(self) -> None:
        self.check = False

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        if find_nvcc() is None:
            print("skipped: the CUDA sources are not compiled, since there is no nvcc on this machine")
            return
        NativeBuild("trireme.models._cuda", WORK, None, find_compiler(), only_checks=self.check).run()
        archs = find_cuda_archs()
        print(
            f"the CUDA sources compile for {f'compute_{archs[-1]}' if self.check else ', '.join(map('sm_{}'.format, archs))}"
        )


NAMES = [
    "trireme.models._native",
    "trireme.serving._native",
    *(["trireme.models._cuda"] if find_nvcc() and has_cuda_torch() else []),
]
EXTENSIONS = [Extension(name, sources=[]) for name in NAMES]
setup(ext_modules=EXTENSIONS, cmdclass={"build": Build, "build_ext": BuildExt, "cuda_compile": CompileCuda})
