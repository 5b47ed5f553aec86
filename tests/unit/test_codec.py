"""The wire format: every message survives it, and nothing from the wire can do more than raise ProtocolError."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from trireme.errors import ProtocolError
from trireme.params import RowParams
from trireme.transport.wire import codec
from trireme.transport.wire.codec import INLINE_BYTES, MessageDecoder, MessageEncoder, decode, encode
from trireme.transport.wire.columns import pack, pack_flags, pack_ids, unpack, unpack_flags, unpack_ids
from trireme.transport.wire.messages import (
    CallReply,
    CoreToWorker,
    EngineToFront,
    FrontToEngine,
    LogprobRow,
    NewRow,
    NextToken,
    Ping,
    StepOutputs,
    StepPlan,
    StepResult,
    Submit,
    ToCoordinator,
    WorkerToCore,
)

UNIONS = [FrontToEngine, EngineToFront, WorkerToCore, CoreToWorker, ToCoordinator]
DTYPES = ["|b1", "|i1", "|u1", "<i2", "<u2", "<i4", "<u4", "<i8", "<u8", "<f2", "<f4", "<f8"]


def submit(prompt: np.ndarray) -> Submit:
    return Submit(7, prompt, RowParams(max_tokens=5, stop_token_ids=(1, 2)), salt=b"s", ticket=1 << 50)


def through_wire(message: object, union: object) -> object:
    frames = [bytes(frame) for frame in encode(message)]
    return decode(frames, union)


@given(
    hnp.arrays(
        dtype=st.sampled_from([np.dtype(name) for name in DTYPES]),
        shape=hnp.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=40),
    )
)
def test_arrays_of_any_dtype_and_shape_survive(array: np.ndarray) -> None:
    back = through_wire(submit(array), FrontToEngine)
    assert back.prompt.dtype == array.dtype
    assert back.prompt.shape == array.shape
    np.testing.assert_array_equal(back.prompt, array)
    assert not back.prompt.flags.writeable or back.prompt.size == 0


@pytest.mark.parametrize("num_tokens", [0, 1, INLINE_BYTES // 4, INLINE_BYTES // 4 + 1, 100_000])
def test_large_arrays_travel_as_their_own_frame_without_a_copy(num_tokens: int) -> None:
    prompt = np.arange(num_tokens, dtype=np.int32)
    frames = encode(submit(prompt))
    is_large = num_tokens * 4 > INLINE_BYTES
    assert len(frames) == (2 if is_large else 1)
    if is_large:
        assert np.shares_memory(np.frombuffer(frames[1], np.int32), prompt)
    back = decode(frames, FrontToEngine)
    np.testing.assert_array_equal(back.prompt, prompt)
    if is_large:
        assert np.shares_memory(back.prompt, prompt)


def test_several_large_arrays_keep_their_places() -> None:
    arrays = [np.full((100, 100), i, np.float32) for i in range(3)]
    rows = [LogprobRow(i, arrays[i].view(np.int32), arrays[i], np.zeros(3, np.int32)) for i in range(3)]
    back = through_wire(StepOutputs(0, 1, pack_ids([1]), pack([2]), logprobs=rows), EngineToFront)
    for i, row in enumerate(back.logprobs):
        np.testing.assert_array_equal(row.logprobs, arrays[i])
        np.testing.assert_array_equal(row.token_ids, arrays[i].view(np.int32))


def test_non_contiguous_arrays_are_sent_as_they_read() -> None:
    array = np.arange(40_000, dtype=np.int32).reshape(200, 200)[::2, 1::3]
    np.testing.assert_array_equal(through_wire(submit(array), FrontToEngine).prompt, array)


COLUMN = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=50)


@given(COLUMN, st.lists(st.integers(0, 2**40)), st.binary(max_size=40))
def test_plans_survive(values: list[int], ids: list[int], salt: bytes) -> None:
    row = NewRow(3, np.array([1, 2, 3], np.int32), 2, RowParams(9, logit_bias=((5, -1.5),)), ids)
    column, flags = pack(values), pack_flags([value > 0 for value in values])
    plan = StepPlan(1, ids, [row], column, column, [(1, 2)], column, column, column, column, flags)
    back = through_wire(plan, CoreToWorker)
    assert msgspec.structs.astuple(back)[3:] == msgspec.structs.astuple(plan)[3:]
    assert unpack(back.rows).tolist() == values
    assert unpack_flags(back.sample).tolist() == [value > 0 for value in values]
    np.testing.assert_array_equal(back.new[0].tokens, row.tokens)
    assert back.new[0].params == row.params


@given(COLUMN, st.data())
def test_results_and_outputs_survive(values: list[int], data: st.DataObject) -> None:
    rids = data.draw(st.lists(st.integers(0, 2**63 - 1), min_size=len(values), max_size=len(values)))
    result = through_wire(StepResult(2, pack(values), pack(values)), WorkerToCore)
    assert (unpack(result.rows).tolist(), unpack(result.tokens).tolist()) == (values, values)
    outputs = through_wire(StepOutputs(0, 2, pack_ids(rids), pack(values)), EngineToFront)
    assert (unpack_ids(outputs.rids).tolist(), unpack(outputs.tokens).tolist()) == (rids, values)


COLUMNS = {
    StepOutputs: ("rids", "tokens"),
    StepResult: ("rows", "tokens"),
    NextToken: ("grown_rows", "grown_blocks", "tokens"),
    StepPlan: ("grown_rows", "grown_blocks", "rows", "num_tokens", "num_computed", "tokens", "sample"),
}


def full_message(kind: type) -> StepOutputs | StepResult | NextToken | StepPlan:
    """A message of three rows, every column of which has entries."""
    three, sample = pack([1, 2, 3]), b"\1\1\0"
    if kind is StepOutputs:
        return StepOutputs(0, 1, pack_ids([1, 2, 3]), three)
    if kind is StepResult:
        return StepResult(1, three, three)
    if kind is NextToken:
        return NextToken(1, three, three, three)
    return StepPlan(1, [], [], three, three, [], three, three, three, three, sample)


@pytest.mark.parametrize("kind", COLUMNS)
@given(data=st.data())
def test_columns_cut_short_or_too_long_are_refused(kind: type, data: st.DataObject) -> None:
    """On either side, whatever the length: with a typed error where it is decoded."""
    message = full_message(kind)
    union = EngineToFront | WorkerToCore | CoreToWorker
    assert through_wire(message, union) == message
    name = data.draw(st.sampled_from(COLUMNS[kind]))
    column = getattr(message, name)
    grown = column * 3
    size = data.draw(st.integers(0, len(grown)).filter(lambda size: size != len(column)))
    if kind is NextToken and name == "tokens" and size % 4 == 0:
        return  # its length is compared with the plan before
    body = msgspec.to_builtins(message, builtin_types=(bytes,))
    body[1 + message.__struct_fields__.index(name)] = grown[:size]
    with pytest.raises(ProtocolError, match="different lengths"):
        decode([msgspec.msgpack.encode(body)], union)
    with pytest.raises(ValueError, match="different lengths"):
        msgspec.structs.replace(message, **{name: grown[:size]})


@settings(max_examples=300)
@given(st.lists(st.binary(max_size=300), max_size=4), st.sampled_from(UNIONS))
@example([b""], FrontToEngine)
@example([], FrontToEngine)
@example([b"\x91" * 100_000], EngineToFront)  # nested 100 000 deep
@example([b"\xdd\xff\xff\xff\xff"], CoreToWorker)  # a list that claims 4 billion items
@example([b"\xc1"], WorkerToCore)
def test_noise_gives_only_protocol_errors(frames: list[bytes], union: object) -> None:
    decoder = MessageDecoder(union | Ping)
    try:
        decoder.decode(frames)
    except ProtocolError:
        pass
    assert decoder.decode(encode(Ping(5))) == Ping(5)  # unharmed


@settings(max_examples=300)
@given(st.data())
def test_flipped_and_cut_frames_give_a_message_or_a_protocol_error(data: st.DataObject) -> None:
    frames = [bytearray(frame) for frame in encode(submit(np.arange(5000, dtype=np.int32)))]
    body = frames[0]
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    frames[1] = frames[1][: data.draw(st.integers(0, len(frames[1])))]
    frames[0] = body[: data.draw(st.integers(0, len(body)))] if data.draw(st.booleans()) else body
    try:
        message = decode([bytes(frame) for frame in frames], FrontToEngine)
    except ProtocolError:
        return
    assert type(message).__name__ in ("Hello", "Submit", "Abort", "Call", "Ping")


def array_on_wire(dtype: object, shape: object, data: object, extra: tuple[bytes, ...] = ()) -> list[bytes]:
    body = ["Submit", 1, [dtype, shape, data], [5]]
    return [msgspec.msgpack.encode(body), *extra]


@pytest.mark.parametrize(
    ("dtype", "shape", "data", "extra"),
    [
        ("|O", [1], b"12345678", ()),  # objects are pointers
        ("<i4", [-1], b"1234", ()),
        ("<i4", [2**62, 2**62], b"", ()),  # product overflows 64 bits
        ("<i4", [True], b"1234", ()),
        ("<i4", [3], b"1234", ()),
        ("<i4", [1] * 9, b"1234", ()),
        ("<i4", [1], 1, ()),  # no such frame
        ("<i4", [1], 0, (b"1234",)),  # the body itself
        ("<i4", [1], -1, (b"1234",)),
        ("<i4", [1], True, (b"1234",)),
        ("<i4", [2], 1, (b"1234",)),
        ("<i4", [1], 1, (b"1234", b"left over")),
        ("<i4", [1], b"1234", (b"left over",)),
        (7, [1], b"1234", ()),
        ("<i4", "1", b"1234", ()),
        ("M8[ns]", [1], b"12345678", ()),
    ],
)
def test_arrays_that_lie_are_refused(dtype: object, shape: object, data: object, extra: tuple[bytes, ...]) -> None:
    with pytest.raises(ProtocolError):
        decode(array_on_wire(dtype, shape, data, extra), FrontToEngine)
    good = decode(array_on_wire("<i4", [1], 1, (b"\1\0\0\0",)), FrontToEngine)
    assert good.prompt.tolist() == [1]


def test_only_the_union_is_accepted() -> None:
    with pytest.raises(ProtocolError, match="Invalid value"):
        decode(encode(StepOutputs(0, 1, b"", b"")), FrontToEngine)


def test_object_arrays_and_strange_values_are_not_sent() -> None:
    encoder = MessageEncoder()
    with pytest.raises(ProtocolError, match="dtype object"):
        encoder.encode(submit(np.array([object()])))
    with pytest.raises(ProtocolError, match="cannot be encoded"):
        encoder.encode(CallReply(1, True, result=object()))
    assert decode(encoder.encode(Ping(1)), FrontToEngine) == Ping(1)


def test_size_caps_hold_in_both_directions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec, "MAX_FRAME_BYTES", 50_000)
    with pytest.raises(ProtocolError, match="50000"):
        encode(submit(np.zeros(60_000, np.int8)))
    with pytest.raises(ProtocolError, match="50000"):
        encode(CallReply(1, True, result="x" * 60_000))
    with pytest.raises(ProtocolError, match="50000"):
        decode([b"x" * 60_000], FrontToEngine)
    with pytest.raises(ProtocolError, match="frames"):
        decode([b"x"] * 65, FrontToEngine)
