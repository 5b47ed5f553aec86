"""msgpack for every message, with arrays inline when small and as separate zero-copy frames when large.

Called by transport/sockets and transport/process/boot.py; pure (no socket, no clock). Must never trust a length, type or shape
from the wire: everything that does not parse is a ProtocolError.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import msgspec
import numpy as np

from trireme.errors import ProtocolError
from trireme.transport.wire.messages import Wire

MAX_FRAME_BYTES = 64 << 20  # one frame of a control message
MAX_FRAMES = 64  # body plus arrays
INLINE_BYTES = 16 << 10  # arrays up to this size travel inside the body
MAX_DIMS = 8

Frame = bytes | bytearray | memoryview

# Allowed dtypes, little-endian on the wire. No object, no structured dtype.
_DTYPES = {
    name: np.dtype(name)
    for name in ("|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8")
}


class MessageEncoder:
    """Encodes messages. Make one per socket and keep it; not thread-safe."""

    def __init__(self) -> None:
        self._arrays: list[Frame] = []
        self._encoder = msgspec.msgpack.Encoder(enc_hook=self._encode_array)

    def encode(self, message: Wire) -> list[Frame]:
        """Frames of `message`: the msgpack body, then one view per large array (do not write to the array afterwards).

        Raises ProtocolError when a frame or the number of frames exceeds its cap, or a value's type is not allowed.
        """
        frames: list[Frame] = [b""]
        self._arrays = frames
        try:
            body = self._encoder.encode(message)
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise ProtocolError(f"{type(message).__name__} cannot be encoded: {error}") from error
        frames[0] = body
        if len(body) > MAX_FRAME_BYTES:
            raise ProtocolError(
                f"{type(message).__name__} takes {len(body)} bytes on the wire; the limit is {MAX_FRAME_BYTES}"
            )
        if len(frames) > MAX_FRAMES:
            raise ProtocolError(f"{type(message).__name__} has {len(frames)} frames; the limit is {MAX_FRAMES}")
        return frames

    def _encode_array(self, value: Any) -> tuple[str, tuple[int, ...], Any]:
        """(dtype, shape, bytes) or, for a large array, (dtype, shape, index of its frame)."""
        if not isinstance(value, np.ndarray):
            raise TypeError(f"{type(value).__name__} may not travel")
        name = value.dtype.str
        if name not in _DTYPES:
            raise TypeError(f"an array of dtype {value.dtype} may not travel")
        if value.nbytes <= INLINE_BYTES or len(self._arrays) >= MAX_FRAMES:
            return name, value.shape, value.tobytes()
        if value.nbytes > MAX_FRAME_BYTES:
            raise ValueError(f"an array of {value.nbytes} bytes is over the limit of {MAX_FRAME_BYTES}")
        self._arrays.append(np.ascontiguousarray(value).data.cast("B"))
        return name, value.shape, len(self._arrays) - 1


class MessageDecoder:
    """Decodes one union of messages (`MessageDecoder(FrontToEngine)`). Make one per socket and keep it; not thread-safe."""

    def __init__(self, accepts: Any) -> None:
        self._frames: Sequence[Frame] = ()
        self._num_used = 0
        self._decoder = msgspec.msgpack.Decoder(accepts, dec_hook=self._decode_array)

    def decode(self, frames: Sequence[Frame]) -> Any:
        """The message. Arrays are read-only views of the frames. Raises ProtocolError, never anything else."""
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise ProtocolError(f"a message has {len(frames)} frames; 1..{MAX_FRAMES} are allowed")
        for frame in frames:
            if len(frame) > MAX_FRAME_BYTES:
                raise ProtocolError(f"a frame has {len(frame)} bytes; the limit is {MAX_FRAME_BYTES}")
        self._frames = frames
        self._num_used = 1
        try:
            message = self._decoder.decode(frames[0])
        except (msgspec.MsgspecError, ValueError, TypeError, OverflowError, RecursionError, MemoryError) as error:
            raise ProtocolError(f"a frame of {len(frames[0])} bytes does not parse: {error}") from error
        finally:
            self._frames = ()
        if self._num_used != len(frames):
            raise ProtocolError(f"{type(message).__name__} came with {len(frames)} frames but uses {self._num_used}")
        return message

    def _decode_array(self, kind: type, value: Any) -> Any:
        if kind is not np.ndarray:
            raise TypeError(f"{kind.__name__} may not travel")
        if not isinstance(value, list) or len(value) != 3:
            raise ValueError("an array is (dtype, shape, data)")
        name, shape, data = value
        dtype = _DTYPES.get(name) if isinstance(name, str) else None
        if dtype is None:
            raise ValueError(f"an array of dtype {name!r:.20} may not travel")
        if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(type(n) is int and n >= 0 for n in shape):
            raise ValueError("an array's shape is at most 8 whole numbers >= 0")
        buffer = self._array_bytes(data)
        if prod(shape) * dtype.itemsize != len(buffer):
            raise ValueError(f"an array of shape {shape} and dtype {name} cannot have {len(buffer)} bytes")
        if not len(buffer):
            return np.empty(shape, dtype)
        array = np.frombuffer(buffer, dtype).reshape(shape)
        array.flags.writeable = False
        return array

    def _array_bytes(self, data: Any) -> Frame:
        if isinstance(data, bytes):
            return data
        # Each frame is used once, in order, so that none is shared or left over.
        if type(data) is not int or data != self._num_used or data >= len(self._frames):
            raise ValueError("an array's data is bytes or the number of the next frame")
        self._num_used += 1
        return self._frames[data]


def encode(message: Wire) -> list[Frame]:
    """One-off `MessageEncoder().encode(message)`, for rare paths and tests."""
    return MessageEncoder().encode(message)


def decode(frames: Sequence[Frame], accepts: Any) -> Any:
    """One-off `MessageDecoder(accepts).decode(frames)`, for rare paths and tests."""
    return MessageDecoder(accepts).decode(frames)
