"""The embedded store through its client: what it keeps, and deadlines that hold."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from server_thread import SECRET_TEXT, ServerThread, agent_channel, store_client, tool_channel

from megatron_bamboo.membership.frames import FRAME_LIMIT_BYTES, encode_body
from megatron_bamboo.membership.store_client import (
    NodeFenced,
    StoreClient,
    StoreError,
    StoreTimeout,
)
from megatron_bamboo.membership.store_server import AgentLink


def test_values_are_any_bytes_and_missing_keys_are_none(client: StoreClient) -> None:
    value = bytes(range(256))
    assert client.get("epoch") is None
    client.set("epoch", value)
    client.set("empty", b"")
    assert (client.get("epoch"), client.get("empty")) == (value, b"")
    assert (client.delete("epoch"), client.delete("epoch")) == (True, False)
    assert client.get("epoch") is None


def test_prefixes_are_counted_and_deleted(client: StoreClient) -> None:
    for key in ("group/1/a", "group/1/b", "group/12/a", "plan/1"):
        client.set(key, b"x")
    assert client.count("group/1/") == 2
    assert client.delete_prefix("group/1/") == 2
    assert (client.count("group/"), client.count("")) == (1, 2)


def test_one_of_many_writes_a_key_from_empty(client: StoreClient) -> None:
    def write(name: str) -> bytes | None:
        return client.compare_set("record/0/node1", None, name.encode())

    with ThreadPoolExecutor(8) as pool:
        answers = set(pool.map(write, (f"writer{i}" for i in range(8))))
    assert len(answers) == 1
    (winner,) = answers
    assert client.get("record/0/node1") == winner
    assert client.compare_set("record/0/node1", winner, b"new") == b"new"
    assert client.compare_set("absent", b"something", b"new") is None


def test_who_is_fenced_reads_and_writes_nothing(server: ServerThread, client: StoreClient) -> None:
    told: list[NodeFenced] = []
    late = store_client(server.address, 5, "node1:0")
    ended = store_client(server.address, 5, "node1:1", fenced=told.append)
    other = store_client(server.address, 5, "node2:0")
    late.set("progress/0/node1:0", b"early")
    server.call(server.table.fenced.add, "node1")
    with pytest.raises(NodeFenced, match="compare_set record/0/node1:0 is refused"):
        late.compare_set("record/0/node1:0", None, b"late")
    with pytest.raises(NodeFenced):
        late.set("progress/0/node1:0", b"late")
    with pytest.raises(NodeFenced):
        ended.wait(["plan/1"])
    assert len(told) == 1
    other.set("progress/0/node2:0", b"there")
    assert client.get("record/0/node1:0") is None
    assert client.get("progress/0/node1:0") == b"early"
    assert client.get("progress/0/node2:0") == b"there"


def test_adds_of_many_threads_add_up(client: StoreClient) -> None:
    with ThreadPoolExecutor(8) as pool:
        sums = sorted(pool.map(lambda _: client.add("counter", 2), range(40)))
    assert sums == list(range(2, 82, 2))
    client.set("text", b"seven")
    with pytest.raises(ValueError, match="text holds no number"):
        client.add("text", 1)


def test_a_wait_ends_when_the_last_key_appears(server: Any, client: StoreClient) -> None:
    timer = threading.Timer(0.1, lambda: server.call(server.table.set_all, {"a": b"", "b": b"1"}))
    timer.start()
    client.wait(["a", "b"], 5)
    assert client.get("b") == b"1"


def test_a_wait_ends_at_its_time_and_names_what_is_missing(client: StoreClient) -> None:
    client.set("here", b"")
    begin = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"wait for gone, missing: not there after 0\.2 s"):
        client.wait(["here", "gone", "missing"], 0.2)
    assert 0.2 <= time.monotonic() - begin < 0.6


def test_a_change_is_seen_at_once_or_the_old_value_comes_back(
    server: Any, client: StoreClient
) -> None:
    assert client.wait_change("epoch", None, 0.1) is None
    threading.Timer(0.1, lambda: server.call(server.table.set, "epoch", b"0")).start()
    assert client.wait_change("epoch", None, 5) == b"0"
    assert client.wait_change("epoch", b"7", 5) == b"0"
    assert client.wait_change("epoch", b"0", 0.1) == b"0"


def test_a_subscriber_hears_every_set_below_its_prefix(server: Any, client: StoreClient) -> None:
    heard: list[tuple[str, bytes]] = []
    server.call(server.table.subscribe, "passed/", lambda key, value: heard.append((key, value)))
    client.compare_set("passed/7", None, b"first")
    client.compare_set("passed/7", None, b"second")
    client.set("plan/1", b"other")
    assert heard == [("passed/7", b"first")]


def test_a_waiting_thread_does_not_delay_another(client: StoreClient) -> None:
    waiting = threading.Thread(target=lambda: client.wait_change("epoch", None, 3))
    waiting.start()
    begin = time.monotonic()
    client.set("other", b"1")
    assert time.monotonic() - begin < 1
    while len(client.filenos()) < 2:  # the waiting thread may still be connecting
        assert time.monotonic() - begin < 3
        time.sleep(0.01)
    client.set("epoch", b"1")
    waiting.join(2)
    assert not waiting.is_alive()


def test_close_releases_a_waiting_thread(client: StoreClient) -> None:
    caught: list[BaseException] = []

    def wait() -> None:
        try:
            client.wait(["never"], 30)
        except StoreError as error:
            caught.append(error)

    waiting = threading.Thread(target=wait)
    waiting.start()
    while not client.filenos():
        time.sleep(0.01)
    time.sleep(0.05)
    client.close()
    waiting.join(2)
    assert len(caught) == 1
    with pytest.raises(StoreError, match="closed"):
        client.get("anything")


@pytest.mark.parametrize(
    "garbage",
    [
        b"not json!",
        b"[]",
        b"{}",
        b"[" * 100_000,
        b'{"op":"format"}',
        b'{"op":"get","key":["a",7]}',
        b'{"op":"set","key":"a","value":7}',
        b'{"op":"wait","keys":["a"],"timeout":"long"}',
    ],
)
def test_nonsense_closes_only_its_own_connection(
    server: ServerThread, client: StoreClient, garbage: bytes
) -> None:
    """Even of one who belongs to the job."""
    client.set("key", b"value")
    with tool_channel(server.address) as stray:
        stray.send(garbage, time.monotonic() + 5)
        assert stray.socket.recv(100) == b""
    assert client.get("key") == b"value"


def test_a_value_beyond_the_frame_limit_is_refused_before_it_is_sent(client: StoreClient) -> None:
    client.set("large", b"x" * (1024 * 1024))
    assert len(client.get("large") or b"") == 1024 * 1024
    with pytest.raises(ValueError, match="split it"):
        client.set("larger", b"x" * FRAME_LIMIT_BYTES)
    assert client.get("larger") is None


class Watcher:
    """Takes node0 only; keeps what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def joined(self, link: AgentLink) -> None:
        if link.node != "node0":
            raise ValueError("unknown")
        self.told.append(("joined", link.node, link.pid))

    def heard(self, link: AgentLink, message: Mapping[str, Any]) -> None:
        self.told.append(("heard", link.node, message["op"]))
        link.send({"op": "stop"})

    def closed(self, link: AgentLink) -> None:
        self.told.append(("closed", link.node))


def test_an_agents_connection_tells_of_its_end() -> None:
    watcher = Watcher()
    running = ServerThread(watcher)
    until = time.monotonic() + 5
    with agent_channel(running.address, "node0") as agent:
        agent.send(encode_body({"op": "hello", "pid": 7}), until)
        assert agent.receive(until) == {"op": "welcome"}
        agent.send(encode_body({"op": "started", "pid": 8}), until)
        assert agent.receive(until) == {"op": "stop"}
    for node, hello in (("node1", {"pid": 7}), ("node0", {}), ("node0", {"pid": "none"})):
        with agent_channel(running.address, node) as stranger:
            stranger.send(encode_body({"op": "hello"} | hello), until)
            assert stranger.socket.recv(100) == b""
    running.stop()
    assert watcher.told == [
        ("joined", "node0", 7),
        ("heard", "node0", "started"),
        ("closed", "node0"),
    ]


SERVER_SCRIPT = """
import asyncio, sys
from megatron_bamboo.membership.store_server import StoreServer
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.table import Table
async def main():
    async with StoreServer(Table(), Secret.of(sys.argv[1])) as server:
        print(server.address, flush=True)
        await asyncio.sleep(60)
asyncio.run(main())
"""


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [signal.SIGSTOP, signal.SIGKILL])
def test_deadlines_hold_when_the_server_falls_silent_or_dies(kind: signal.Signals) -> None:
    command = [sys.executable, "-c", SERVER_SCRIPT, SECRET_TEXT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        client = store_client(process.stdout.readline().strip(), 0.5)
        client.set("key", b"value")
        os.kill(process.pid, kind)
        begin = time.monotonic()
        with pytest.raises(StoreTimeout, match="get key: the store at 127"):
            client.get("key")
        assert 0.5 <= time.monotonic() - begin < 1
        with pytest.raises(StoreTimeout):
            client.wait(["never"], 0.3)
        process.kill()
        client.close()


def test_a_broken_connection_is_made_anew(client: StoreClient) -> None:
    client.set("key", b"value")
    (descriptor,) = client.filenos()
    with socket.socket(fileno=os.dup(descriptor)) as same:
        same.shutdown(socket.SHUT_RDWR)
    assert client.get("key") == b"value"
