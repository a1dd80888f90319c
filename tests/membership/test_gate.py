"""Strangers at a real port: nothing changes, and those who belong to the job are served [10]."""

import contextlib
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import psutil
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from needs import missing
from server_thread import INCARNATION, SECRET, ServerThread, agent_channel, channel, store_client
from wiretap import FlipOnce, Wiretap

from megatron_bamboo.membership import gate
from megatron_bamboo.membership import store_client as store_client_module
from megatron_bamboo.membership.channel import Channel, Impostor
from megatron_bamboo.membership.frames import encode_body, encode_frame, receive_frame
from megatron_bamboo.membership.greeting import PROOF
from megatron_bamboo.membership.keys import Credential, Secret
from megatron_bamboo.membership.sealing import Direction, Nonces, Session
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout
from megatron_bamboo.membership.store_server import AgentLink

OTHER_SECRET = Secret.of("the secret of another job, which is as long")
SECONDS = 10.0
HELLO = encode_body({"op": "hello", "pid": 7})


def connect(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), SECONDS)


def say_all(connection: socket.socket, said: bytes) -> None:
    """Say something and no more; the server may have enough before the end."""
    with contextlib.suppress(OSError):
        connection.sendall(said)
        connection.shutdown(socket.SHUT_WR)


def is_closed(connection: socket.socket) -> bool:
    """Whether the server ends a connection, whatever it may have said before."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(1 << 16):
            pass
    return True


def snapshot(server: ServerThread) -> dict[str, bytes]:
    return dict(server.call(server.table.items, ""))


class Watcher:
    """Keeps what it is told of agents."""

    def __init__(self) -> None:
        self.told: list[tuple[str, str]] = []

    def joined(self, link: AgentLink) -> None:
        self.told.append(("joined", f"{link.node}/{link.incarnation}"))

    def heard(self, link: AgentLink, message: Mapping[str, Any]) -> None:
        self.told.append(("heard", f"{link.node}/{message['op']}"))
        link.send({"op": "heard", "word": "7"})

    def closed(self, link: AgentLink) -> None:
        self.told.append(("closed", link.node))


@pytest.fixture
def watcher() -> Watcher:
    return Watcher()


@pytest.fixture
def server(watcher: Watcher) -> Iterator[ServerThread]:
    running = ServerThread(watcher)
    running.call(running.table.set, "epoch", b"3")
    yield running
    running.stop()


@pytest.fixture
def wiretap(server: ServerThread) -> Iterator[Wiretap]:
    tapped = Wiretap(server.address)
    yield tapped
    tapped.close()


GREETING = encode_frame({"role": asdict(SECRET.tool().role), "nonce": "00" * 32})
GARBAGE = [
    b"",
    b"\0",
    b"\0\0\0\0",
    b"\xff\xff\xff\xff" + b"x" * 100,
    b"GET / HTTP/1.1\r\nHost: here\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 200,
    encode_frame({"op": "set", "key": "epoch", "value": "OQ=="}),
    encode_frame({"op": "hello", "node": "node0", "pid": 7, "incarnation": "a"}),
    encode_frame({"role": {"kind": "leader"}, "nonce": "00" * 32}),
    encode_frame({"role": asdict(SECRET.tool().role), "nonce": "00" * 31}),
    encode_frame({"role": asdict(SECRET.tool().role), "nonce": 7}),
    b"\0\0\x08\0" + b"[" * 2048,
    GREETING[:-1],
    GREETING + b"\xff\xff\xff\xff",
    GREETING + b"\0" * 100,
    GREETING + encode_frame({"op": "set", "key": "epoch", "value": "OQ=="}) * 20,
]


@pytest.mark.parametrize("said", GARBAGE, ids=range(len(GARBAGE)))
def test_rubbish_changes_nothing_and_ends_only_its_own_connection(
    server: ServerThread, watcher: Watcher, said: bytes
) -> None:
    before = snapshot(server)
    client = store_client(server.address, SECONDS)
    assert client.get("epoch") == b"3"
    with connect(server.address) as stranger:
        say_all(stranger, said)
        assert is_closed(stranger)
    assert client.get("epoch") == b"3"
    client.close()
    assert (snapshot(server), watcher.told) == (before, [])


@given(st.binary(max_size=300))
@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_random_bytes_are_no_greeting(server: ServerThread, said: bytes) -> None:
    with connect(server.address) as stranger:
        say_all(stranger, said)
        assert is_closed(stranger)


@pytest.mark.parametrize(
    "whose",
    [
        OTHER_SECRET.tool(),
        OTHER_SECRET.node("node0", INCARNATION).agent(),
        Credential(SECRET.tool().role, SECRET.node("node0", INCARNATION).agent().key),
        Credential(SECRET.node("node0", INCARNATION).agent().role, SECRET.node("node1", "1").key),
        Credential(SECRET.node("node0", "2").agent().role, SECRET.node("node0", "1").agent().key),
        Credential(
            SECRET.node("node0", "1").agent().role, SECRET.node("node0", "1").worker("node0").key
        ),
    ],
)
def test_a_role_without_its_key_gets_nowhere(
    server: ServerThread, watcher: Watcher, whose: Credential
) -> None:
    """Whose secret is another notices it first, and whoever goes on without the key is ended."""
    until = time.monotonic() + SECONDS
    with pytest.raises(Impostor, match="does not prove"), channel(server.address, whose):
        raise AssertionError("it was let in")
    with connect(server.address) as stranger:
        stranger.sendall(encode_frame({"role": asdict(whose.role), "nonce": "07" * 32}))
        nonce = bytes.fromhex(receive_frame(stranger, until)["nonce"])
        session = Session(whose, Nonces(b"\7" * 32, nonce), Direction.TO_SERVER)
        stranger.sendall(session.seal(PROOF) + session.seal(HELLO))
        assert is_closed(stranger)
    assert watcher.told == []


def test_a_recorded_session_is_worth_nothing(
    server: ServerThread, watcher: Watcher, wiretap: Wiretap
) -> None:
    client = store_client(wiretap.address, SECONDS)
    assert client.add("count", 1) == 1
    client.set("epoch", b"4")
    client.close()
    with agent_channel(wiretap.address, "node0") as agent:
        agent.send(HELLO, time.monotonic() + SECONDS)
        assert agent.receive(time.monotonic() + SECONDS) == {"op": "welcome"}
    while len(watcher.told) < 2:
        time.sleep(0.01)
    server.call(server.table.set, "epoch", b"5")
    before, told = snapshot(server), list(watcher.told)
    for said in map(bytes, wiretap.heard):
        with connect(server.address) as stranger:
            say_all(stranger, said)
            assert is_closed(stranger)
    assert len(wiretap.heard) == 2
    assert (snapshot(server), watcher.told) == (before, told)


@pytest.mark.parametrize("way", ["to_server", "to_client"])
@pytest.mark.parametrize("change", ["twice", "back", "other"])
def test_what_is_repeated_or_put_in_is_not_taken(
    server: ServerThread, wiretap: Wiretap, way: str, change: str
) -> None:
    """The call is made again on another connection, and has its effect once."""
    client = store_client(wiretap.address, SECONDS)
    assert client.add("count", 1) == 1
    changes: Mapping[str, Callable[[bytes], bytes]] = {
        "twice": lambda piece: piece + piece,
        "back": lambda piece: piece[:4] + bytes([piece[4] ^ 1]) + piece[5:],
        "other": lambda piece: bytes(len(piece)),
    }
    done = threading.Event()

    def once(piece: bytes) -> bytes:
        if done.is_set():
            return piece
        done.set()
        return changes[change](piece)

    setattr(wiretap, way, once)
    assert [client.add("count", 1) for _ in range(3)] == [2, 3, 4]
    assert done.is_set()
    assert len(wiretap.heard) == 2
    client.close()


@given(number=st.integers(0, 2), bit=st.integers(0, 8 * 400), to_server=st.booleans())
@example(number=0, bit=27, to_server=True)
@example(number=0, bit=27, to_server=False)
@example(number=1, bit=20, to_server=True)
@example(number=1, bit=10, to_server=False)
@example(number=2, bit=30, to_server=True)
@example(number=2, bit=30, to_server=False)
@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_flipped_bit_costs_a_connection_and_nothing_else(
    server: ServerThread,
    wiretap: Wiretap,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
    bit: int,
    to_server: bool,
) -> None:
    """Wherever it is, in greetings, proofs or calls; in a length it also costs some time."""
    for where in (gate, store_client_module):
        monkeypatch.setattr(where, "FRAME_SECONDS", 0.5)
    monkeypatch.setattr(gate, "GREETING_SECONDS", 0.5)
    flip = FlipOnce(number, bit)
    setattr(wiretap, "to_server" if to_server else "to_client", flip)
    client = store_client(wiretap.address, SECONDS)
    key = f"count{time.monotonic_ns()}"
    assert [client.add(key, 1) for _ in range(3)] == [1, 2, 3]
    assert flip.was_done
    assert server.call(server.table.get, key) == b"3"
    client.close()


def test_a_flipped_bit_in_an_agents_words_is_not_its_end(
    server: ServerThread, watcher: Watcher, wiretap: Wiretap
) -> None:
    """It has its lease to come back; what is flipped is a node's life and death."""
    until = time.monotonic() + SECONDS
    with agent_channel(wiretap.address, "node0") as agent:
        agent.send(HELLO, until)
        assert agent.receive(until) == {"op": "welcome"}
        wiretap.to_server = FlipOnce(0, 8 * 20)
        agent.send(encode_body({"op": "hung", "cause": "a flipped bit"}), until)
        assert is_closed(agent.socket)
    with agent_channel(server.address, "node0") as agent:
        agent.send(HELLO, until)
        assert agent.receive(until) == {"op": "welcome"}
        assert watcher.told == [("joined", f"node0/{INCARNATION}")] * 2


def test_an_agent_calls_no_store_and_a_worker_is_no_agent(
    server: ServerThread, watcher: Watcher
) -> None:
    until = time.monotonic() + SECONDS
    write = encode_body({"op": "set", "key": "epoch", "value": "OQ=="})
    with agent_channel(server.address, "node0") as agent:
        agent.send(write, until)
        assert is_closed(agent.socket)
    worker = SECRET.node("node0", INCARNATION).worker("node0")
    with channel(server.address, worker) as calling:
        calling.send(HELLO, until)
        assert is_closed(calling.socket)
    assert (watcher.told, server.call(server.table.get, "epoch")) == ([], b"3")


@pytest.mark.parametrize("said", [b"", b"\0", GREETING[:7], GREETING, GREETING + b"\0\0"])
def test_who_says_too_little_is_ended_in_time(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch, said: bytes
) -> None:
    monkeypatch.setattr(gate, "GREETING_SECONDS", 0.2)
    with connect(server.address) as stranger:
        stranger.sendall(said)
        assert is_closed(stranger)


def test_one_word_at_a_time_does_not_help(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The deadline is for the whole greeting."""
    monkeypatch.setattr(gate, "GREETING_SECONDS", 0.3)
    with connect(server.address) as stranger, contextlib.suppress(ConnectionError):
        for byte in GREETING:
            stranger.sendall(bytes([byte]))
            time.sleep(0.02)
        raise AssertionError("it was listened to all the time")


def test_only_so_many_may_wait_and_those_who_belong_here_are_served(
    server: ServerThread, watcher: Watcher, caplog: pytest.LogCaptureFixture
) -> None:
    until = time.monotonic() + SECONDS
    client = store_client(server.address, SECONDS)
    with agent_channel(server.address, "node0") as agent, contextlib.ExitStack() as idle:
        agent.send(HELLO, until)
        assert agent.receive(until) == {"op": "welcome"}
        strangers = [idle.enter_context(connect(server.address)) for _ in range(200)]
        agent.send(encode_body({"op": "alive"}), until)
        assert agent.receive(until)["op"] == "heard"
        assert client.get("epoch") == b"3"
        late = store_client(server.address, SECONDS)  # outruns who is silent
        assert late.get("epoch") == b"3"
        late.close()
        ended = sum(is_ended(stranger) for stranger in strangers)
        assert len(strangers) - gate.MOST_WAITING <= ended <= len(strangers) - gate.MOST_WAITING + 1
    client.close()
    lines = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert [record.getMessage() for record in lines] == [
        "turned away 127.0.0.1: 'more come than say who they are'"
    ]


def is_ended(connection: socket.socket) -> bool:
    """Whether the server has ended a connection already."""
    connection.setblocking(False)
    try:
        return connection.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


@pytest.mark.parametrize("kind", ["silent", "garbled", "knowing nothing"])
def test_a_client_tells_a_stranger_nothing(kind: str) -> None:
    """Who took the port of a store that is gone hears a greeting, and no call."""
    heard = bytearray()
    answers = {
        "silent": b"",
        "garbled": b"\0\0\x01\0" + b"x" * 256,
        "knowing nothing": encode_frame({"nonce": "00" * 32})
        + Session(OTHER_SECRET.tool(), Nonces(b"", b""), Direction.TO_CLIENT).seal(PROOF),
    }

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = listener.accept()
                with connection:
                    connection.settimeout(1)
                    connection.sendall(answers[kind])
                    with contextlib.suppress(OSError):
                        while piece := connection.recv(1 << 16):
                            heard.extend(piece)

    listener = socket.create_server(("127.0.0.1", 0))
    listening = threading.Thread(target=listen)
    listening.start()
    client = store_client(f"127.0.0.1:{listener.getsockname()[1]}", 0.5, "node0")
    proves = "does not prove that it has this job's secret"
    why = "did not answer" if kind == "silent" else proves
    with pytest.raises(StoreTimeout, match=why):
        client.set("plan/1", b"what nobody else may know")
    client.close()
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    listening.join(SECONDS)
    assert b"plan" not in heard
    assert heard.startswith(b"\0\0") and b"node0" in heard


def test_a_client_that_says_nothing_after_its_greeting_is_not_yet_one(
    server: ServerThread,
) -> None:
    """A greeting alone, of one who knows the role's name, opens nothing."""
    until = time.monotonic() + SECONDS
    half_open = Channel(connect(server.address), SECRET.tool(), until)
    client: StoreClient = store_client(server.address, SECONDS)
    assert client.get("epoch") == b"3"
    assert not half_open.is_open
    half_open.close()
    client.close()


def test_calls_with_little_time_wait_for_one_greeting_together(
    server: ServerThread, wiretap: Wiretap
) -> None:
    """A busy server answers late; whoever gave up each time would never get through."""

    def late(piece: bytes) -> bytes:
        time.sleep(1.0)
        return piece

    wiretap.to_client = late
    client = store_client(wiretap.address, 0.3)
    until = time.monotonic() + 3 * SECONDS
    with pytest.raises(StoreTimeout):
        client.get("epoch")
    while not any(b"epoch" in heard for heard in wiretap.heard):  # it comes to a call
        assert time.monotonic() < until
        with contextlib.suppress(StoreTimeout):
            client.get("epoch")
    client.close()


def vanish(connection: socket.socket) -> None:
    """End a connection as a machine does that loses its power: nobody is told."""
    repair = 19  # TCP_REPAIR, which the socket module has no name for
    try:
        connection.setsockopt(socket.IPPROTO_TCP, repair, 1)
    except PermissionError as error:
        missing("netns", f"a connection cannot vanish without root ({error})")
    connection.close()


def server_connections(server: ServerThread) -> int:
    """How many connections the server, a part of this process, has open."""
    port = int(server.address.rpartition(":")[2])
    connections = psutil.Process().net_connections("tcp")
    return sum(c.laddr.port == port and c.status != psutil.CONN_LISTEN for c in connections)


def test_connections_of_machines_that_vanish_end(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else each node that is taken away would cost its workers' descriptors for ever."""
    for name in ("QUIET_SECONDS", "ASKING_SECONDS"):
        monkeypatch.setattr(gate, name, 1)
    until = time.monotonic() + SECONDS
    taken = []
    for node in ("node0", "node1", "node2"):
        worker = SECRET.node(node, INCARNATION).worker(node)
        taken.append(Channel(connect(server.address), worker, until))
        taken[-1].open(until)
        taken[-1].send(encode_body({"op": "get", "key": "epoch"}), until)
        assert taken[-1].receive(until) == {"value": "Mw=="}
    assert server_connections(server) == 3
    for channel_of_one in taken:
        vanish(channel_of_one.socket)
    until = time.monotonic() + SECONDS
    while (left := server_connections(server)) > 0:
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_an_agents_newest_connection_ends_the_one_before(
    server: ServerThread, watcher: Watcher
) -> None:
    """The old one may lead nowhere any more, and would stay; it is not the node's end."""
    until = time.monotonic() + SECONDS
    with agent_channel(server.address, "node0") as first:
        first.send(HELLO, until)
        assert first.receive(until) == {"op": "welcome"}
        with agent_channel(server.address, "node0") as second:
            second.send(HELLO, until)
            assert second.receive(until) == {"op": "welcome"}
            assert is_closed(first.socket)
            second.send(encode_body({"op": "alive"}), until)
            assert second.receive(until) == {"op": "heard", "word": "7"}
    assert ("heard", "node0/alive") in watcher.told
