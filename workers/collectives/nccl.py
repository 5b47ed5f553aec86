"""NCCL communicators through ctypes: the library that ships with torch, called without torch.distributed.

Used by workers.collectives.cuda. Calls launch on torch's current stream, so they can be captured in a CUDA graph. A failure of a
peer shows in `failure`, not in the call; `abort` ends kernels that wait for one. NVLink multicast stays off.
"""

from __future__ import annotations

import ctypes
import importlib.util
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trireme.errors import CollectiveError

ID_BYTES = 128
TYPES = {
    torch.int8: 0,
    torch.uint8: 1,
    torch.int32: 2,
    torch.int64: 4,
    torch.float16: 6,
    torch.float32: 7,
    torch.float64: 8,
    torch.bfloat16: 9,
}
SUM, MAX = 0, 2  # reduction operators
IN_PROGRESS = 7
# NCCL reads the process's environment when it is first used.
SETTINGS = {b"NCCL_NVLS_ENABLE": b"0"}

_pointer, _size, _int = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int


class UniqueId(ctypes.Structure):
    """The id shared by the ranks of one communicator; rank 0 creates it."""

    _fields_ = (("internal", ctypes.c_ubyte * ID_BYTES),)


_out = ctypes.POINTER(_pointer)
SIGNATURES: dict[str, list[Any]] = {
    "ncclGetVersion": [ctypes.POINTER(_int)],
    "ncclGetUniqueId": [ctypes.POINTER(UniqueId)],
    "ncclCommInitRank": [_out, _int, UniqueId, _int],
    "ncclCommGetAsyncError": [_pointer, ctypes.POINTER(_int)],
    "ncclCommAbort": [_pointer],
    "ncclCommDestroy": [_pointer],
    "ncclAllReduce": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclReduceScatter": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclAllGather": [_pointer, _pointer, _size, _int, _pointer, _pointer],
    "ncclBroadcast": [_pointer, _pointer, _size, _int, _int, _pointer, _pointer],
    "ncclSend": [_pointer, _size, _int, _int, _pointer, _pointer],
    "ncclRecv": [_pointer, _size, _int, _int, _pointer, _pointer],
}


class Nccl:
    """The library. Its methods raise CollectiveError with NCCL's own message."""

    def __init__(self, native: Any) -> None:
        for name, arguments in SIGNATURES.items():
            function = getattr(native, name)
            function.argtypes, function.restype = arguments, _int
        native.ncclGetErrorString.argtypes, native.ncclGetErrorString.restype = [_int], ctypes.c_char_p
        self._native = native

    def call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._native, name)(*arguments)
        if status:
            raise CollectiveError(f"{name}: {self.text(status)}")

    def text(self, status: int) -> str:
        """The message of a status code."""
        return str(self._native.ncclGetErrorString(status).decode())

    def version(self) -> int:
        """The version as a number: 22803 is 2.28.3."""
        found = _int()
        self.call("ncclGetVersion", ctypes.byref(found))
        return found.value

    def unique_id(self) -> bytes:
        """An id for one communicator; all of its ranks must get the same bytes."""
        made = UniqueId()
        self.call("ncclGetUniqueId", ctypes.byref(made))
        return bytes(made.internal)


def places() -> list[str]:
    """Candidate paths of the library, likeliest first: torch's packages, what torch is linked with, the system's search path."""
    found = []
    spec = importlib.util.find_spec("nvidia")
    for root in spec.submodule_search_locations or [] if spec else []:
        found += sorted(str(path) for path in Path(root).glob("*/lib/libnccl.so.2"))
    own = Path(torch.__file__).parent / "lib"
    found += [str(path) for name in ("libnccl.so.2", "libtorch_cuda.so") for path in own.glob(name)]
    return [*found, "libnccl.so.2"]


def load_nccl(candidates: Iterable[str] | None = None) -> Nccl:
    """The first of `candidates` (default `places()`) that loads. Raises CollectiveError listing every attempt's error."""
    libc = ctypes.CDLL(None)
    for name, value in SETTINGS.items():
        libc.setenv(name, value, 1)
    said = []
    for path in places() if candidates is None else candidates:
        try:
            return Nccl(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            said.append(str(error))
    raise CollectiveError(
        f"NCCL does not load: {'; '.join(said)}", hint="install torch for CUDA, which brings it along"
    )


class _Launch(NamedTuple):
    """A tensor as NCCL arguments."""

    address: int
    values: int
    type: int


class NcclComm:
    """One communicator. All its ranks make the same calls in the same order; calls are asynchronous.

    Raises CollectiveError when the ranks do not connect within `timeout_s`.
    """

    def __init__(self, nccl: Nccl, unique_id: bytes, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size = rank, size
        self._nccl = nccl
        self._handle = _pointer()
        device = torch.cuda.current_device() if torch.cuda.is_available() else None
        made = UniqueId.from_buffer_copy(unique_id)

        def meet() -> None:
            if device is not None:
                torch.cuda.set_device(device)
            nccl.call("ncclCommInitRank", ctypes.byref(self._handle), size, made, rank)

        within(timeout_s, meet, f"rank {rank} of {size} waits for the others in NCCL")

    def all_reduce(self, x: Tensor, op: int = SUM) -> Tensor:
        """Sum (or MAX) over ranks, in place."""
        at = _launch(x)
        self._run("ncclAllReduce", at.address, at.address, at.values, at.type, op)
        return x

    def reduce_scatter(self, x: Tensor, out: Tensor) -> Tensor:
        """out = this rank's part of the sum over ranks; x holds `size` parts in rank order."""
        at, to = _launch(x), _launch(out)
        _need(at.values == self.size * to.values and at.type == to.type, f"{at.values} values for parts of {to.values}")
        self._run("ncclReduceScatter", at.address, to.address, to.values, to.type, SUM)
        return out

    def all_gather(self, x: Tensor, out: Tensor) -> Tensor:
        """out = all ranks' x, concatenated."""
        at, to = _launch(x), _launch(out)
        _need(to.values == self.size * at.values and at.type == to.type, f"{to.values} values for parts of {at.values}")
        self._run("ncclAllGather", at.address, to.address, at.values, at.type)
        return out

    def broadcast(self, x: Tensor, root: int = 0) -> Tensor:
        """Copies rank `root`'s x to every rank, in place."""
        at = _launch(x)
        self._run("ncclBroadcast", at.address, at.address, at.values, at.type, root)
        return x

    def send(self, x: Tensor, to: int) -> None:
        """Sends to one rank, which must receive as many values."""
        self._run("ncclSend", *_launch(x), to)

    def recv(self, x: Tensor, source: int) -> Tensor:
        """Receives from one rank, into x."""
        self._run("ncclRecv", *_launch(x), source)
        return x

    def failure(self) -> str:
        """The first failure since the start, "" while there is none. Callable from any thread."""
        if not self._handle:
            return "the communicator was aborted"
        found = _int()
        self._nccl.call("ncclCommGetAsyncError", self._handle, ctypes.byref(found))
        return self._nccl.text(found.value) if found.value not in (0, IN_PROGRESS) else ""

    def abort(self) -> None:
        """Ends kernels in flight; the communicator is unusable afterwards. Callable from any thread, any number of times."""
        handle, self._handle = self._handle, _pointer()
        if handle:
            self._nccl.call("ncclCommAbort", handle)

    def _run(self, name: str, *arguments: Any) -> None:
        if not self._handle:
            raise CollectiveError(f"{name}: the communicator was aborted")
        self._nccl.call(name, *arguments, self._handle, torch.cuda.current_stream().cuda_stream)


def within(timeout_s: float, do: Callable[[], None], doing: str) -> None:
    """Runs `do` in a thread of its own. Raises what it raises, or CollectiveError after `timeout_s`."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            do()
        except CollectiveError as error:
            failed.append(error)

    thread = threading.Thread(target=run, name="nccl", daemon=True)
    thread.start()
    thread.join(timeout_s)
    if thread.is_alive():
        raise CollectiveError(f"{doing}: nothing for {timeout_s:g} s")
    if failed:
        raise failed[0]


def _launch(x: Tensor) -> _Launch:
    _need(x.is_contiguous(), f"a tensor of shape {tuple(x.shape)} and strides {x.stride()} is not contiguous")
    _need(x.dtype in TYPES, f"NCCL has no {x.dtype}")
    return _Launch(x.data_ptr(), x.numel(), TYPES[x.dtype])


def _need(is_so: bool, text: str) -> None:
    if not is_so:
        raise CollectiveError(text)
