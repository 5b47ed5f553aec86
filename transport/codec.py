"""msgpack for every message, with arrays inline when small and as separate frames, without a copy, when large.

Called by sockets.py and boot.py; pure (no socket, no clock). Must never trust a length, type or shape from the wire:
everything that does not parse is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transport.messages import Wire

MAX_FRAME_BYTES = 64 << 20  # one frame of a control message
MAX_FRAMES = 64  # body plus arrays
INLINE_BYTES = 16 << 10  # arrays up to this size travel inside the body

Frame = bytes | bytearray | memoryview


def encode(message: Wire) -> list[Frame]:
    """Frames of `message`: the msgpack body, then one frame per large array (a view: do not write to the array afterwards).

    Raises ProtocolError when a frame or their number is over its cap, or an array's dtype may not travel. Thread-safe.
    """
    raise NotImplementedError


class Decoder:
    """Decodes one union of messages (`Decoder(FrontToEngine)`). Make one per socket and keep it; not thread-safe."""

    def __init__(self, accepts: Any) -> None: ...

    def decode(self, frames: Sequence[Frame]) -> Any:
        """The message. Arrays are read-only views of the frames. Raises ProtocolError, never anything else."""
        raise NotImplementedError


def decode(frames: Sequence[Frame], accepts: Any) -> Any:
    """One-off `Decoder(accepts).decode(frames)`, for rare paths and tests."""
    return Decoder(accepts).decode(frames)
