"""Connections between real processes: handshake, death, freezing, restart, floods, hostile frames, keys."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import uvloop
import zmq

from tests.procs.deployment import HASH, Deployment, wait_for
from trireme.errors import ConfigError, TransportError
from trireme.params import RowParams
from trireme.transport.process.boot import Child
from trireme.transport.sockets.address import CurveKeys, check_address, connect_address, make_secret_keys
from trireme.transport.sockets.aio import AsyncConnection
from trireme.transport.sockets.framing import HEAD_BYTES, head_of
from trireme.transport.sockets.local import LocalServer
from trireme.transport.sockets.names import Connection, Disconnected, Identity, Peer, Poller, Server, Waker
from trireme.transport.wire.codec import decode, encode
from trireme.transport.wire.columns import pack, pack_ids, unpack_ids
from trireme.transport.wire.messages import (
    PROTOCOL_VERSION,
    Abort,
    Call,
    CallReply,
    EngineDown,
    EngineFacts,
    EngineToFront,
    FrontToEngine,
    Hello,
    Ping,
    Pong,
    Refused,
    StepOutputs,
    Submit,
    Welcome,
)

SOCKET = "engine-0.front"
FACTS = EngineFacts(0, 100, 256, 10, 16, 4, 8, 1000)


@pytest.fixture
def deployment() -> Iterator[Deployment]:
    deployment = Deployment()
    yield deployment
    deployment.close()


@pytest.fixture
def tcp_deployment() -> Iterator[Deployment]:
    deployment = Deployment(make_secret_keys())
    yield deployment
    deployment.close()


def submit(rid: int, num_tokens: int = 10) -> Submit:
    return Submit(rid, np.ones(num_tokens, np.int32), RowParams(max_tokens=1))


class Client:
    """A Connection with its poller and everything it has received."""

    def __init__(self, deployment: Deployment, name: str = "front-0", epoch: int = 0, **options: Any) -> None:
        self.link = Connection.open(deployment.boot("front", name, epoch), SOCKET, EngineToFront, **options)
        self.got: list[Any] = []
        self.poller = Poller()
        self.poller.add(self.link, lambda: self.got.extend(m for m in self.link.receive() if type(m) is not Pong))

    def until(self, kind: type, timeout_s: float = 10.0) -> Any:
        """The next message of `kind`; forgets those before it."""
        deadline = time.monotonic() + timeout_s
        while True:
            while self.got:
                message = self.got.pop(0)
                if isinstance(message, kind):
                    return message
            assert time.monotonic() < deadline, f"no {kind.__name__} within {timeout_s} s"
            self.poller.wait(0.1)

    def call(self, method: str, **args: Any) -> Any:
        assert self.link.send(Call(1, method, args))
        return self.until(CallReply).result


@pytest.fixture
def client(deployment: Deployment) -> Iterator[Client]:
    client = Client(deployment)
    yield client
    client.link.close(0)


class Raw:
    """A bare ZMQ socket, to say what no Connection would say."""

    def __init__(self, address: str) -> None:
        self.socket: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.DEALER)
        self.socket.linger = 0
        self.socket.rcvtimeo = 5000
        self.socket.connect(address)
        self.sequence = 0

    def say(self, message: Any) -> None:
        frames = encode(message)
        self.send([head_of(self.sequence, frames) + frames[0], *frames[1:]])
        self.sequence += 1

    def send(self, frames: list[bytes]) -> None:
        self.socket.send_multipart(frames)

    def hear(self) -> Any:
        body = self.socket.recv_multipart()[0]
        return decode([body[HEAD_BYTES:]], EngineToFront)


@pytest.fixture
def raw(deployment: Deployment) -> Iterator[Callable[[], Raw]]:
    made: list[Raw] = []

    def make() -> Raw:
        made.append(Raw(f"ipc://{deployment.run_dir.path}/{SOCKET}"))
        return made[-1]

    yield make
    for each in made:
        each.socket.close()


def hello(**changes: Any) -> Hello:
    return msgspec.structs.replace(Hello(PROTOCOL_VERSION, HASH, "front", "front-9", 0, os.getpid()), **changes)


# ---------------------------------------------------------------- life


def test_messages_and_arrays_cross_in_both_directions(deployment: Deployment, client: Client) -> None:
    child = deployment.start("engine", "engine-0", do="serve")
    welcome = client.until(Welcome)
    assert (welcome.name, welcome.epoch, welcome.pid, welcome.config_hash) == ("engine-0", 0, child.pid, HASH)
    for rid, num_tokens in ((1, 10), (2, 1_000_000), (3, 0)):
        assert client.link.send(submit(rid, num_tokens))
        outputs = client.until(StepOutputs)
        assert (outputs.rids, outputs.tokens) == (pack_ids([rid]), pack([num_tokens]))
    assert client.link.counts()["gaps"] == 0
    assert client.link.server_progress >= 0


def test_a_client_that_comes_first_is_connected_when_its_server_appears(deployment: Deployment, client: Client) -> None:
    assert not client.link.send(submit(1))
    client.poller.wait(0.05)
    assert not client.link.is_up
    deployment.start("engine", "engine-0", do="serve")
    start = time.monotonic()
    client.until(Welcome)
    assert time.monotonic() - start < 1.0


def test_a_killed_server_is_noticed_within_a_second_and_its_next_life_is_welcome(
    deployment: Deployment, client: Client
) -> None:
    child = deployment.start("engine", "engine-0", do="serve")
    client.until(Welcome)
    os.kill(child.pid, signal.SIGKILL)
    start = time.monotonic()
    left = client.until(Disconnected)
    assert time.monotonic() - start < 1.0
    assert left.reason == "engine-0.front closed its connection"
    assert not client.link.send(submit(1))  # nothing is kept for a later server
    deployment.start("engine", "engine-0", epoch=1, do="serve")
    assert client.until(Welcome).epoch == 1
    assert client.call("counts")["received"] == 2  # Hello and the call: nothing of the former life
    assert client.link.send(submit(2))
    assert client.until(StepOutputs).rids == pack_ids([2])


def test_last_words_arrive_before_the_end_is_noticed(deployment: Deployment, client: Client) -> None:
    deployment.start("engine", "engine-0", do="serve")
    client.until(Welcome)
    client.link.send(Call(1, "last words", {"count": 1000}))
    wait_for(lambda: client.poller.wait(0.1) and client.got and isinstance(client.got[-1], Disconnected))
    seen = client.got
    assert [m.step for m in seen if isinstance(m, StepOutputs)] == list(range(1000))
    assert [type(m) for m in seen[-2:]] == [EngineDown, Disconnected]


def test_a_killed_client_is_noticed_within_a_second(deployment: Deployment) -> None:
    with Server.open(deployment.boot("engine", "engine-0"), SOCKET, FrontToEngine) as server:
        events: list[tuple[Peer, Any]] = []
        poller = Poller()
        poller.add(server, lambda: events.extend(server.receive()))
        child = deployment.start("front", "front-0", until_ready=False, do="connect")
        wait_for(lambda: poller.wait(0.05) and events)
        peer, first = events.pop()
        assert isinstance(first, Hello)
        assert server.peers == {"front-0": peer}
        wait_for(lambda: child.receive() is not None and child.is_ready)
        os.kill(child.pid, signal.SIGKILL)
        assert wait_for(lambda: poller.wait(0.05) and events) < 1.0
        assert events[0][0] is peer
        assert isinstance(events[0][1], Disconnected)
        assert peer.gone
        assert not server.send(peer, Ping(1))
        assert not server.peers
        assert len(events) == 1


@pytest.mark.parametrize("frozen", ["server", "client"])
def test_a_frozen_side_is_given_up_and_comes_back_by_itself(deployment: Deployment, frozen: str) -> None:
    if frozen == "server":
        child = deployment.start("engine", "engine-0", do="serve")
        client = Client(deployment, silence_s=1.5)
        client.until(Welcome)
        os.kill(child.pid, signal.SIGSTOP)
        assert "silent" in client.until(Disconnected, 4.0).reason
        os.kill(child.pid, signal.SIGCONT)
        assert client.until(Welcome, 4.0).epoch == 0
        client.link.close(0)
        return
    with Server.open(deployment.boot("engine", "engine-0"), SOCKET, FrontToEngine, silence_s=1.5) as server:
        events: list[Any] = []
        poller = Poller()
        poller.add(server, lambda: events.extend(message for _, message in server.receive()))
        child = deployment.start("front", "front-0", until_ready=False, do="connect")
        wait_for(lambda: poller.wait(0.05) and events)
        os.kill(child.pid, signal.SIGSTOP)
        wait_for(lambda: poller.wait(0.05) and len(events) > 1, 4.0)
        assert "silent" in events[1].reason
        os.kill(child.pid, signal.SIGCONT)
        wait_for(lambda: poller.wait(0.05) and len(events) > 2, 4.0)
        assert isinstance(events[2], Hello)


def test_silence_is_not_held_against_the_peers_of_a_server_that_was_away(deployment: Deployment) -> None:
    with Server.open(deployment.boot("engine", "engine-0"), SOCKET, FrontToEngine, silence_s=1.0) as server:
        client = Client(deployment)
        events: list[Any] = []
        poller = Poller()
        poller.add(server, lambda: events.extend(message for _, message in server.receive()))
        poller.add(client.link, lambda: list(client.link.receive()) and None)
        wait_for(lambda: poller.wait(0.01) and client.link.is_up)
        time.sleep(3.0)  # one long step in the owner's own thread
        poller.wait(0.1)
        poller.wait(0.1)
        assert [type(e) for e in events if not isinstance(e, Ping)] == [Hello]
        client.link.close(0)


def test_a_new_connection_of_the_same_name_replaces_the_old_one(deployment: Deployment, raw: Callable[[], Raw]) -> None:
    with Server.open(deployment.boot("engine", "engine-0"), SOCKET, FrontToEngine) as server:
        events: list[Any] = []
        poller = Poller()
        poller.add(server, lambda: events.extend(server.receive()))
        first, second, stale = raw(), raw(), raw()
        first.say(hello(epoch=1))
        wait_for(lambda: poller.wait(0.05) and len(events) == 1)
        second.say(hello(epoch=2))
        wait_for(lambda: poller.wait(0.05) and len(events) == 3)
        assert [type(message) for _, message in events] == [Hello, Disconnected, Hello]
        assert events[1][0] is events[0][0]
        stale.say(hello(epoch=1))
        first.say(Abort([1]))
        wait_for(lambda: poller.wait(0.05) or server.counts()["refused"] == 2)
        assert "replaced by epoch 2" in stale.hear().reason
        assert isinstance(first.hear(), Welcome)
        assert first.hear().reason == "say Hello first"
        assert len(events) == 3


def test_a_peer_that_does_not_read_is_dropped_and_the_sender_never_blocks(deployment: Deployment) -> None:
    with Server.open(deployment.boot("engine", "engine-0"), SOCKET, FrontToEngine) as server:
        events: list[Any] = []
        poller = Poller()
        poller.add(server, lambda: events.extend(server.receive()))
        child = deployment.start("front", "front-0", until_ready=False, do="connect")
        wait_for(lambda: poller.wait(0.05) and events)
        os.kill(child.pid, signal.SIGSTOP)
        peer = events.pop()[0]
        outputs = StepOutputs(0, 1, pack_ids(range(200)), pack(range(200)))
        slowest = 0.0
        count, sent = 0, True
        while sent and count < 100_000:
            count += 1
            start = time.monotonic()
            sent = server.send(peer, outputs)
            slowest = max(slowest, time.monotonic() - start)
        assert 4000 < count < 20_000
        assert slowest < 0.5
        assert "unread" in next(iter(server.receive()))[1].reason
        assert not server.peers


# ---------------------------------------------------------------- refusals


def test_another_protocol_version_is_refused_with_both_numbers(deployment: Deployment, raw: Callable[[], Raw]) -> None:
    deployment.start("engine", "engine-0", do="serve")
    stranger = raw()
    stranger.say(hello(protocol=99))
    answer = stranger.hear()
    assert isinstance(answer, Refused)
    assert "protocol version 99" in answer.reason
    assert f"speaks {PROTOCOL_VERSION}" in answer.reason


def test_another_configuration_is_refused_by_name(deployment: Deployment) -> None:
    deployment.start("engine", "engine-0", do="serve")
    boot = deployment.boot("front", "front-3", config_hash=b"x" * 32)
    with (
        Connection.open(boot, SOCKET, EngineToFront) as link,
        pytest.raises(TransportError, match="front-3 was started with another configuration than engine-0"),
    ):
        link.wait_up(5.0)


def test_wait_up_says_when_nobody_is_there(deployment: Deployment, client: Client) -> None:
    with pytest.raises(TransportError, match=r"engine-0.front did not answer within 0.2 s"):
        client.link.wait_up(0.2)


def test_wait_up_consumes_nothing(deployment: Deployment, client: Client) -> None:
    deployment.start("engine", "engine-0", do="serve")
    welcome = client.link.wait_up(5.0)
    assert client.until(Welcome) is welcome


def framed(sequence: int, *frames: bytes) -> list[bytes]:
    return [head_of(sequence, frames) + frames[0], *frames[1:]]


def flipped(frames: list[bytes], at: int) -> list[bytes]:
    return [frames[0][:at] + bytes([frames[0][at] ^ 4]) + frames[0][at + 1 :], *frames[1:]]


BAD = {
    "nothing": [b""],
    "less than a head": [b"\1\0\0"],
    "no message": framed(1, b"\xc1\xc1"),
    "other direction": framed(1, encode(StepOutputs(0, 1, b"", b""))[0]),
    "a frame too many": framed(1, encode(submit(1))[0], b"an array nobody asked for"),
    "too many frames": framed(1, b"", *[b"x"] * 100),
    "no checksum": [b"\1\0\0\0\0\0\0\0" + encode(submit(1))[0]],
    "altered": flipped(framed(1, encode(submit(1))[0]), 13),
    "altered array": [*framed(1, *encode(submit(1, 9000)))[:1], b"y" * 36000],
    "cut": [framed(1, encode(submit(1))[0])[0][:-3]],
    "lost": framed(4, encode(submit(1))[0]),
    "repeated": framed(0, encode(submit(1))[0]),
    "another release": framed(1, encode(Hello(PROTOCOL_VERSION + 1, HASH, "front", "front-9", 0, os.getpid()))[0]),
}


@pytest.mark.parametrize("frames", BAD.values(), ids=BAD)
def test_what_is_not_the_next_message_as_it_was_sent_ends_its_connection_only(
    deployment: Deployment, client: Client, raw: Callable[[], Raw], frames: list[bytes]
) -> None:
    deployment.start("engine", "engine-0", do="serve")
    client.until(Welcome)
    stranger, peer = raw(), raw()
    peer.say(hello())
    assert isinstance(peer.hear(), Welcome)
    stranger.send(frames)
    peer.send(frames)
    assert re.search(f"say Hello first|speaks protocol version {PROTOCOL_VERSION + 1}", stranger.hear().reason)
    assert "front-9" in peer.hear().reason
    assert client.link.send(submit(6))
    assert client.until(StepOutputs).rids == pack_ids([6])
    events = client.call("events")
    assert [event.split()[:2] for event in events if "front-9" in event] == [
        ["Hello", "front-9"],
        ["Disconnected", "front-9"],
    ]
    assert sum(client.call("counts")[kind] for kind in ("malformed", "gaps", "refused")) >= 2
    peer.sequence = 0
    peer.say(hello())
    assert isinstance(peer.hear(), Welcome)
    peer.say(submit(5))
    assert peer.hear().rids == pack_ids([5])


def test_numbers_tell_how_many_messages_were_lost(
    deployment: Deployment, client: Client, raw: Callable[[], Raw]
) -> None:
    deployment.start("engine", "engine-0", do="serve")
    client.until(Welcome)
    peer = raw()
    peer.say(hello())
    assert isinstance(peer.hear(), Welcome)
    peer.sequence += 3
    peer.say(submit(1))
    assert "message 1 of front-9 is missing: number 4 came" in peer.hear().reason
    assert client.call("counts")["gaps"] == 3


def test_a_frame_over_the_cap_ends_its_connection_only(
    deployment: Deployment, client: Client, raw: Callable[[], Raw]
) -> None:
    deployment.start("engine", "engine-0", do="serve")
    client.until(Welcome)
    raw().send([bytes((64 << 20) + 100)])
    assert client.link.send(submit(6))
    assert client.until(StepOutputs).rids == pack_ids([6])
    assert client.call("counts")["gaps"] == 0


# ---------------------------------------------------------------- tcp and keys


def test_tcp_with_keys_survives_a_restart_on_another_port(tcp_deployment: Deployment) -> None:
    client = Client(tcp_deployment)
    first = tcp_deployment.start("engine", "engine-0", do="serve")
    client.until(Welcome)
    client.link.send(submit(1, 100_000))
    assert client.until(StepOutputs).tokens == pack([100_000])
    os.kill(first.pid, signal.SIGKILL)
    client.until(Disconnected, 2.0)
    tcp_deployment.start("engine", "engine-0", epoch=1, do="serve")
    assert client.until(Welcome).epoch == 1
    client.link.close(0)


@pytest.mark.parametrize("keys", ["none", "wrong client", "wrong server"])
def test_wrong_keys_do_not_get_in(tcp_deployment: Deployment, keys: str) -> None:
    child = tcp_deployment.start("engine", "engine-0", do="serve")
    right, wrong = tcp_deployment.secret_keys, make_secret_keys()
    address = connect_address(tcp_deployment.boot("front", "front-9"), SOCKET)
    assert address is not None
    assert address.startswith("tcp://127.0.0.1:")
    stranger = Raw.__new__(Raw)
    stranger.socket = zmq.Context.instance().socket(zmq.DEALER)
    stranger.socket.linger, stranger.socket.rcvtimeo, stranger.sequence = 0, 700, 0
    if keys != "none":
        stranger.socket.curve_serverkey = (wrong if keys == "wrong server" else right)["server_public"]
        stranger.socket.curve_publickey = (wrong if keys == "wrong client" else right)["client_public"]
        stranger.socket.curve_secretkey = (wrong if keys == "wrong client" else right)["client_secret"]
    stranger.socket.connect(address)
    stranger.say(hello())
    with pytest.raises(zmq.Again):
        stranger.hear()
    stranger.socket.close()
    client = Client(tcp_deployment)
    client.until(Welcome)
    assert client.call("events") == ["Hello front-0 "]
    client.link.close(0)
    assert not child.is_dead


def test_addresses_that_must_not_be_used_are_refused() -> None:
    keys = CurveKeys(**make_secret_keys())
    for address, given_keys, why in [
        ("tcp://0.0.0.0:5555", keys, "every interface"),
        ("tcp://*:5555", keys, "every interface"),
        ("tcp://[::]:5555", keys, "every interface"),
        ("tcp://10.0.0.7:5555", None, "without CURVE keys"),
        ("tcp://example.org:5555", None, "without CURVE keys"),
        ("ipc://@abstract", None, "every user"),
        ("ipc:///tmp/" + "x" * 120, None, "the system allows 107"),
        ("udp://127.0.0.1:5555", None, "neither"),
    ]:
        with pytest.raises(ConfigError, match=why):
            check_address(address, given_keys)
    check_address("tcp://127.0.0.1:5555", None)
    check_address("tcp://[::1]:5555", None)
    check_address("tcp://10.0.0.7:5555", keys)


def test_a_taken_address_is_a_config_error() -> None:
    me = Identity("engine", "engine-0", 0, HASH)
    with (
        Server("tcp://127.0.0.1:*", FrontToEngine, me) as server,
        pytest.raises(ConfigError, match="cannot listen on tcp"),
    ):
        Server(server.address, FrontToEngine, me)


# ---------------------------------------------------------------- asyncio, wakers, one process


@pytest.mark.parametrize("loop_factory", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def test_the_asyncio_side_delivers_everything_in_order_over_a_restart(
    deployment: Deployment, loop_factory: Callable[[], asyncio.AbstractEventLoop]
) -> None:
    async def scenario() -> None:
        got: list[Any] = []
        link = AsyncConnection.open(deployment.boot("front", "front-0"), SOCKET, EngineToFront, got.append)
        child: Child = await asyncio.to_thread(deployment.start, "engine", "engine-0", do="serve")
        welcome = await link.wait_up(5.0)
        assert welcome.epoch == 0
        for rid in range(3000):
            assert link.send(submit(rid))
        async with asyncio.timeout(10):
            while sum(isinstance(m, StepOutputs) for m in got) < 3000:
                await asyncio.sleep(0.01)
        assert [unpack_ids(m.rids)[0] for m in got if isinstance(m, StepOutputs)] == list(range(3000))
        os.kill(child.pid, signal.SIGKILL)
        start = time.monotonic()
        async with asyncio.timeout(2):
            while link.is_up:
                await asyncio.sleep(0.005)
        assert time.monotonic() - start < 1.0
        await asyncio.to_thread(deployment.start, "engine", "engine-0", 1, do="serve")
        assert (await link.wait_up(5.0)).epoch == 1
        kinds = [type(m) for m in got if isinstance(m, Welcome | Disconnected)]
        assert kinds == [Welcome, Disconnected, Welcome]
        link.close()
        link.close()
        assert not link.send(submit(1))

    with asyncio.Runner(loop_factory=loop_factory) as runner:
        runner.run(scenario())


async def test_the_asyncio_side_reports_refusal_and_silence(deployment: Deployment) -> None:
    await asyncio.to_thread(deployment.start, "engine", "engine-0", do="serve")
    boot = deployment.boot("front", "front-0", config_hash=b"x" * 32)
    link = AsyncConnection.open(boot, SOCKET, EngineToFront, lambda message: None)
    with pytest.raises(TransportError, match="another configuration"):
        await link.wait_up(5.0)
    link.close()
    link = AsyncConnection.open(deployment.boot("front", "f"), "engine-7.front", EngineToFront, lambda message: None)
    with pytest.raises(TransportError, match="did not answer within"):
        await link.wait_up(0.1)
    link.close()


def test_a_waker_wakes_a_poller_from_another_thread() -> None:
    waker, poller, woken = Waker(), Poller(), []
    poller.add(waker, lambda: woken.append(1))
    poller.wait(0)
    woken.clear()
    assert not poller.wait(0.02)
    threading.Timer(0.05, waker.set).start()
    start = time.monotonic()
    assert poller.wait(5.0)
    assert time.monotonic() - start < 1.0
    assert woken == [1]
    assert not poller.wait(0)
    poller.remove(waker)
    waker.close()
    waker.set()


async def test_the_local_pair_behaves_like_sockets() -> None:
    server, got = LocalServer(), []
    poller, seen = Poller(), []

    def on_front() -> None:
        for peer, message in server.receive():
            seen.append(message)
            if isinstance(message, Submit):
                server.send(peer, StepOutputs(0, 1, pack_ids([message.rid]), pack([int(message.prompt.sum())])))

    poller.add(server, on_front)
    stop = threading.Event()

    def engine() -> None:
        while not stop.is_set():
            poller.wait(0.05)

    link = server.connect("front-0", got.append)
    assert not link.send(submit(1))  # not welcomed yet
    server.set_facts(FACTS)
    thread = threading.Thread(target=engine)
    thread.start()
    try:
        assert (await link.wait_up(2.0)).facts == FACTS
        for rid in range(500):
            assert link.send(submit(rid))
        async with asyncio.timeout(5):
            while len(got) < 501:
                await asyncio.sleep(0.001)
        assert [unpack_ids(m.rids)[0] for m in got[1:]] == list(range(500))
        other = server.connect("front-1", got.append)
        await other.wait_up(2.0)
        other.close()
        async with asyncio.timeout(5):
            while not any(isinstance(message, Disconnected) for message in seen):
                await asyncio.sleep(0.001)
        assert set(server.peers) == {"front-0"}
    finally:
        stop.set()
        thread.join()
    server.close()
    await asyncio.sleep(0)
    assert isinstance(got[-1], Disconnected)
    assert not link.is_up
    assert not link.send(submit(1))


def test_a_waker_is_closed_under_those_who_set_it() -> None:
    """They write to it or to nothing: never to a number that is closed, or somebody else's by then."""
    errors: list[BaseException] = []

    def keep_setting(waker: Waker, over: threading.Event) -> None:
        try:
            while not over.is_set():
                waker.set()
        except BaseException as error:
            errors.append(error)

    former = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for _ in range(200):
            waker, over = Waker(), threading.Event()
            threads = [threading.Thread(target=keep_setting, args=(waker, over)) for _ in range(2)]
            for thread in threads:
                thread.start()
            time.sleep(0.0005)
            waker.close()
            time.sleep(0.0005)
            over.set()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(former)
    assert errors == []
