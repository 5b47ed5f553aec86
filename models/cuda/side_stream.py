"""A second stream of the current GPU, for kernels of a captured step that may run beside others. Used by models.cuda.decoder."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch


@lru_cache
def _stream_of(device: int) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


@contextmanager
def forked() -> Iterator[torch.cuda.Stream | None]:
    """A stream on which kernels run beside those that the block launches on the current one, and after all launched before; what
    is launched later waits for both. None outside of captures, where the events would cost the host more than they gain."""
    side = _stream_of(torch.cuda.current_device())  # made before the first capture
    if not torch.cuda.is_current_stream_capturing():
        yield None
        return
    current = torch.cuda.current_stream()
    side.wait_stream(current)
    yield side
    current.wait_stream(side)
