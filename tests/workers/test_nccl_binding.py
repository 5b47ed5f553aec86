"""The ctypes binding to NCCL without a GPU: a library that is a stand-in, errors in NCCL's words, deadlines."""

from __future__ import annotations

import ctypes
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from trireme.errors import CollectiveError
from trireme.workers.collectives.nccl import ID_BYTES, SIGNATURES, Nccl, NcclComm, load_nccl, places, within


class Function:
    """One function of the stand-in; keeps what it was called with."""

    def __init__(self, does: Any) -> None:
        self._does = does
        self.calls: list[tuple[Any, ...]] = []

    def __call__(self, *arguments: Any) -> Any:
        self.calls.append(arguments)
        return self._does(*arguments)


class Library:
    """All of NCCL's functions; they succeed unless `status` says otherwise."""

    def __init__(self, **status: int) -> None:
        for name in SIGNATURES:
            setattr(self, name, Function(lambda *arguments, name=name: status.get(name, 0)))
        self.ncclGetErrorString = Function(lambda code: f"status {code}".encode())


def test_a_library_that_is_not_there_is_named() -> None:
    with pytest.raises(CollectiveError, match=r"nowhere\.so.*also-not\.so") as caught:
        load_nccl(["/nowhere.so", "/also-not.so"])
    assert "install" in caught.value.hint


def test_a_library_that_is_another_one_is_refused() -> None:
    libc = next(str(path) for path in Path("/lib").rglob("libc.so.6"))
    with pytest.raises(CollectiveError, match="ncclGetVersion"):
        load_nccl([libc])


def test_multicast_is_off_in_what_nccl_will_read() -> None:
    with pytest.raises(CollectiveError):
        load_nccl([])
    libc = ctypes.CDLL(None)
    libc.getenv.restype = ctypes.c_char_p
    assert libc.getenv(b"NCCL_NVLS_ENABLE") == b"0"


def test_errors_are_in_ncclS_words() -> None:
    nccl = Nccl(Library(ncclGetUniqueId=5))
    with pytest.raises(CollectiveError, match="ncclGetUniqueId: status 5"):
        nccl.unique_id()
    assert len(Nccl(Library()).unique_id()) == ID_BYTES


def test_ranks_that_fail_to_meet() -> None:
    with pytest.raises(CollectiveError, match="ncclCommInitRank: status 3"):
        NcclComm(Nccl(Library(ncclCommInitRank=3)), bytes(ID_BYTES), 0, 2, timeout_s=5)


def test_ranks_that_never_meet() -> None:
    with pytest.raises(CollectiveError, match=r"waiting: nothing for 0\.05 s"):
        within(0.05, lambda: time.sleep(1), "waiting")


def comm_over(library: Library) -> NcclComm:
    library.ncclCommInitRank = Function(lambda out, size, unique_id, rank: (setattr(out._obj, "value", 77), 0)[1])
    return NcclComm(Nccl(library), bytes(ID_BYTES), 0, 2, timeout_s=5)


def test_an_asynchronous_failure_is_told_and_progress_is_none() -> None:
    library = Library()
    comm = comm_over(library)
    assert comm.failure() == ""
    for code, text in ((7, ""), (6, "status 6")):
        library.ncclCommGetAsyncError = Function(
            lambda handle, out, code=code: (setattr(out._obj, "value", code), 0)[1]
        )
        assert comm.failure() == text


def test_aborting_twice_aborts_once() -> None:
    library = Library()
    comm = comm_over(library)
    comm.abort()
    comm.abort()
    assert len(library.ncclCommAbort.calls) == 1  # type: ignore[attr-defined]
    assert "aborted" in comm.failure()
    with pytest.raises(CollectiveError, match="ncclAllReduce: the communicator was aborted"):
        comm.all_reduce(torch.zeros(4))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda comm: comm.all_reduce(torch.zeros(8)[::2]), "not contiguous"),
        (lambda comm: comm.all_reduce(torch.zeros(8, dtype=torch.complex64)), "NCCL has no torch.complex64"),
        (lambda comm: comm.all_gather(torch.zeros(8), torch.zeros(8)), "8 values for parts of 8"),
        (lambda comm: comm.reduce_scatter(torch.zeros(9), torch.zeros(4)), "9 values for parts of 4"),
    ],
    ids=["strides", "type", "gather", "scatter"],
)
def test_tensors_that_nccl_would_misread_are_refused(call: Any, says: str) -> None:
    with pytest.raises(CollectiveError, match=says):
        call(comm_over(Library()))


def test_nccl_is_looked_for_in_torch_before_the_system(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A torch that has NCCL linked in brings no library of that name along."""
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setattr(torch, "__file__", str(tmp_path / "__init__.py"))
    assert places()[-2:] == [str(tmp_path / "lib" / "libtorch_cuda.so"), "libnccl.so.2"]
