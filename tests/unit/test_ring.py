"""Rings in shared memory: every reader gets every message once and in order, wherever it travelled."""

from __future__ import annotations

import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trireme.errors import ProtocolError
from trireme.transport.memory.ring import ENTRIES, ENTRY_BYTES, Ring, RingReceiver, RingSender, is_supported
from trireme.transport.sockets.names import Poller
from trireme.transport.wire.columns import pack
from trireme.transport.wire.messages import Call, LogprobRow, RingPlace, SetupKV, StepResult

pytestmark = pytest.mark.skipif(not is_supported(), reason="sockets are used here")
ORDERS = Call | SetupKV
ROOT = Path(__file__).resolve().parents[2]
ECHO = """
import sys, msgspec
from trireme.transport.memory.ring import RingReceiver, RingSender
from trireme.transport.sockets.names import Poller
from trireme.transport.wire.messages import Call, RingPlace
orders = RingReceiver(msgspec.json.decode(sys.argv[1], type=RingPlace), Call)
results = RingSender(msgspec.json.decode(sys.argv[2], type=RingPlace)) if len(sys.argv) > 4 else None
poller, seen = Poller(), []
poller.add(orders, lambda: seen.extend(orders.receive()))
while len(seen) < int(sys.argv[-1]):
    before = len(seen)
    poller.wait(5)
    for message in seen[before:]:
        if results is not None:
            assert results.send(message)
assert [message.call_id for message in seen] == list(range(len(seen)))
"""


class Sockets:
    """Stands for the sockets between a sender and its receivers: what the ring did not take arrives when the test says so."""

    def __init__(self, num_readers: int) -> None:
        self.queues: list[deque[Any]] = [deque() for _ in range(num_readers)]

    def send(self, message: Any) -> None:
        for queue in self.queues:
            queue.append(message)

    def deliver(self, reader: int, receiver: RingReceiver) -> None:
        while self.queues[reader]:
            receiver.add(self.queues[reader].popleft())


def order(number: int, size: int = 0) -> Call:
    return Call(number, "info", {"text": "x" * size})


def test_every_reader_gets_every_message_in_order() -> None:
    ring = Ring(3)
    sender, receivers = ring.sender(), [ring.receiver(at, ORDERS) for at in range(3)]
    for round_ in range(3 * ENTRIES):
        messages = [order(2 * round_), order(2 * round_ + 1, 5000)]
        assert all(sender.send(message) for message in messages)
        assert [list(receiver.receive()) for receiver in receivers] == [messages] * 3
    for part in (sender, *receivers, ring, ring, sender):
        part.close()


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_order_of_sending_reading_and_delivering(data: st.DataObject) -> None:
    num_readers = data.draw(st.integers(1, 3))
    ring = Ring(num_readers)
    sender, receivers = ring.sender(), [ring.receiver(at, ORDERS) for at in range(num_readers)]
    sockets, sent = Sockets(num_readers), []
    got: list[list[Any]] = [[] for _ in receivers]
    for _ in range(data.draw(st.integers(0, 80))):
        match data.draw(st.sampled_from(["send", "send", "large", "read", "deliver"])):
            case "send" | "large" as kind:
                sent.append(order(len(sent), ENTRY_BYTES if kind == "large" else 10))
                if not sender.send(sent[-1]):
                    sockets.send(sent[-1])
            case "read":
                at = data.draw(st.integers(0, num_readers - 1))
                got[at] += receivers[at].receive()
            case "deliver":
                at = data.draw(st.integers(0, num_readers - 1))
                sockets.deliver(at, receivers[at])
        assert all(messages == sent[: len(messages)] for messages in got)
    for at, receiver in enumerate(receivers):
        sockets.deliver(at, receiver)
        got[at] += receiver.receive()
    assert got == [sent] * num_readers
    for part in (sender, *receivers, ring):
        part.close()


def test_a_reader_that_falls_behind_loses_nothing_and_the_rest_comes_by_socket() -> None:
    ring = Ring(2)
    sender, quick, slow = ring.sender(), ring.receiver(0, ORDERS), ring.receiver(1, ORDERS)
    sockets, seen = Sockets(2), []
    for number in range(2 * ENTRIES):
        in_ring = sender.send(order(number))
        assert in_ring == (number < ENTRIES - 1)
        if not in_ring:
            sockets.send(order(number))
        sockets.deliver(0, quick)
        seen += quick.receive()
    assert seen == [order(number) for number in range(2 * ENTRIES)]
    assert list(slow.receive()) == seen[: ENTRIES - 1]
    sockets.deliver(1, slow)
    assert list(slow.receive()) == seen[ENTRIES - 1 :]
    for part in (sender, quick, slow, ring):
        part.close()


def test_arrays_are_frames_of_a_entry() -> None:
    ring = Ring(1)
    sender, receiver = ring.sender(), ring.receiver(0, StepResult)
    ids = np.arange(9000, dtype="<i4")  # more bytes than travel inside a body
    message = StepResult(7, pack([0]), pack([5]), logprobs=[LogprobRow(0, ids, ids / 3, ids[:0])])
    assert not sender.send(message), "over 64 KB"
    receiver.add(message)
    small = StepResult(8, pack([0]), pack([5]), logprobs=[LogprobRow(0, ids[:5000], ids[:3000].astype("<f4"), ids[:1])])
    assert sender.send(small)
    first, second = receiver.receive()
    assert first is message
    assert second.step == 8
    assert second.logprobs[0].token_ids.tolist() == list(range(5000))
    assert second.logprobs[0].logprobs.tolist() == [float(number) for number in range(3000)]
    for part in (sender, receiver, ring):
        part.close()


def test_what_is_not_as_sent_is_an_error() -> None:
    ring = Ring(1)
    sender, receiver = ring.sender(), ring.receiver(0, ORDERS)
    assert sender.send(order(1))
    assert sender.send(order(2))
    second = receiver._first + ENTRY_BYTES  # the entry of the second message
    receiver._memory[second] = 9
    found = receiver.receive()
    assert next(found) == order(1)
    with pytest.raises(ProtocolError, match="holds message 9, not 1"):
        next(found)
    for part in (sender, receiver, ring):
        part.close()


@pytest.mark.parametrize("num_readers", [1, 2, 4])
def test_between_processes(num_readers: int) -> None:
    count, ring, results = 1000, Ring(num_readers), Ring(1)
    sender, answers = ring.sender(), results.receiver(0, Call)
    text = lambda place: msgspec.json.encode(place).decode()  # noqa: E731
    back = text(results.place(0, writes=True))
    readers = []
    for at in range(num_readers):
        words = [sys.executable, "-c", ECHO, text(ring.place(at)), back, *(["reports"] if at == 0 else []), str(count)]
        readers.append(subprocess.Popen(words, cwd=ROOT))
    got: list[Any] = []
    poller = Poller()
    poller.add(answers, lambda: got.extend(answers.receive()))
    number = 0
    try:
        while len(got) < count:
            while number < count and number - len(got) < 4 and sender._next - sender._slowest() < ENTRIES // 2:
                assert sender.send(order(number, number % 3000))
                number += 1
            poller.wait(0.01)
        assert [reader.wait(10) for reader in readers] == [0] * num_readers
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
        for part in (sender, answers, ring, results):
            part.close()
    assert [message.call_id for message in got] == list(range(count))


def test_the_owner_being_gone_is_an_error_of_opening() -> None:
    ring = Ring(1)
    place = ring.place(0)
    ring.close()
    with pytest.raises(OSError, match="No such file"):
        RingReceiver(place, ORDERS)
    with pytest.raises(OSError, match="No such file"):
        RingSender(RingPlace(place.memory, place.bells, 0, 1))


def test_nothing_is_left_open() -> None:
    before = len(os.listdir("/proc/self/fd"))
    ring = Ring(4)
    parts = [ring.sender(), ring.receiver(2, ORDERS), ring]
    for part in parts:
        part.close()
    assert len(os.listdir("/proc/self/fd")) == before
