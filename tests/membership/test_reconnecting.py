"""A client whose store goes away and comes back elsewhere, and calls that may come twice."""

import asyncio
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from server_thread import SECRET, SECRET_TEXT, store_client, tool_channel
from store_kinds import Store

from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE, Address, Signpost
from megatron_bamboo.membership.frames import encode_body
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout
from megatron_bamboo.membership.store_server import StoreServer
from megatron_bamboo.membership.table import Table

STORE = """
import asyncio, os, sys, time
from pathlib import Path
from megatron_bamboo.membership.address import ADDRESS_FILE, Address
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.leadership import Deposed, Hooks, LeaderLives
from megatron_bamboo.membership.store_server import StoreServer
from megatron_bamboo.membership.stores import open_journal
from megatron_bamboo.membership.table import Table

def end(error):
    os._exit(7 if isinstance(error, Deposed) else 1)

def claim(journal):
    while True:
        try:
            return journal.claim(float(sys.argv[3]))
        except LeaderLives:
            time.sleep(0.1)

async def main(folder):
    journal = open_journal(folder, Hooks(failed=end))
    generation = claim(journal)
    async with StoreServer(Table(journal), Secret.of(sys.argv[2])) as server:
        port = int(server.address.rpartition(":")[2])
        Address("127.0.0.1", port, generation, os.getpid()).write(folder / ADDRESS_FILE)
        print(port, flush=True)
        await asyncio.sleep(60)

asyncio.run(main(Path(sys.argv[1])))
"""
DEPOSED_STATUS = 7
Start = Callable[[], "subprocess.Popen[str]"]


@pytest.fixture
def start(store: Store) -> Iterator[Start]:
    """Start a store of its own process; each takes the place of the one before."""
    started = []

    def run() -> "subprocess.Popen[str]":
        command = [
            sys.executable,
            "-c",
            STORE,
            str(store.job_dir),
            SECRET_TEXT,
            str(store.limit_seconds),
        ]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout is not None
        assert process.stdout.readline()
        return process

    yield run
    for process in started:
        process.kill()
        process.communicate()


@pytest.fixture
def client(store: Store) -> Iterator[StoreClient]:
    connected = store_client(str(store.job_dir / ADDRESS_FILE), 30)
    yield connected
    connected.close()


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[object]]:
    answers: list[object] = []
    thread = threading.Thread(target=lambda: answers.append(call()), daemon=True)
    thread.start()
    return thread, answers


def test_an_address_is_fixed_or_what_the_file_says_now(tmp_path: Path) -> None:
    path = tmp_path / ADDRESS_FILE
    signpost = Signpost(str(path))
    assert signpost.find() is None
    for generation in (1, 2):
        address = Address("10.0.0.1", 4000 + generation, generation, 77)
        address.write(path)
        assert signpost.find() == address
    assert [p.name for p in tmp_path.iterdir()] == [ADDRESS_FILE]
    assert Signpost("127.0.0.1:77").find() == Address("127.0.0.1", 77)


def test_while_its_file_cannot_be_read_the_store_is_where_it_was(tmp_path: Path) -> None:
    path = tmp_path / ADDRESS_FILE
    address, signpost = Address("10.0.0.1", 4001, 1, 77), Signpost(str(path))
    address.write(path)
    assert signpost.find() == address
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        assert signpost.find() == address
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    path.unlink()
    assert signpost.find() is None


@pytest.mark.parametrize("text", ["", '{"host": "10.0.', "[1, 2]", '{"host": 7, "port": 1}'])
def test_a_file_that_is_not_whole_is_waited_for_and_followed_when_it_is(
    tmp_path: Path, text: str
) -> None:
    """What a file system leaves of it must end nobody who works in the job."""
    path = tmp_path / ADDRESS_FILE
    address, signpost = Address("10.0.0.1", 4001, 1, 77), Signpost(str(path))
    signpost.check()
    path.write_text(text)
    assert signpost.find() is None and not signpost.leads_to(address)
    with pytest.raises(UserError, match="does not say where a coordinator is"):
        signpost.check()
    address.write(path)
    assert signpost.find() == address and signpost.leads_to(address)
    path.write_text(text)
    assert signpost.find() == address and not signpost.leads_to(address)
    path.unlink()
    assert signpost.find() is None


def test_without_anybody_a_call_ends_at_its_deadline(tmp_path: Path) -> None:
    client = store_client(str(tmp_path / ADDRESS_FILE), 0.3)
    began = time.monotonic()
    with pytest.raises(StoreTimeout, match=r"get key: the store at .* did not answer within 0\.3"):
        client.get("key")
    with pytest.raises(StoreTimeout):
        client.wait(["key"], 0.1)
    assert 0.3 <= time.monotonic() - began < 3


@pytest.mark.multiprocess
@pytest.mark.parametrize("kind", [signal.SIGKILL, signal.SIGSTOP])
def test_calls_go_to_whoever_leads_next(start: Start, client: StoreClient, kind: int) -> None:
    first = start()
    client.set("epoch", b"3")
    assert client.add("count", 1) == 1
    os.kill(first.pid, kind)
    calls = [
        in_thread(lambda: client.get("epoch")),
        in_thread(lambda: client.compare_set("record/3/node0", None, b"mine")),
        in_thread(lambda: client.add("count", 1)),
        in_thread(lambda: client.wait_change("epoch", b"3", 20)),
    ]
    time.sleep(0.5)
    assert all(not answers for _, answers in calls)
    start()
    for thread, _ in calls[:3]:
        thread.join(20)
    client.set("epoch", b"4")
    calls[3][0].join(20)
    assert [answers for _, answers in calls] == [[b"3"], [b"mine"], [2], [b"4"]]


@pytest.mark.multiprocess
def test_one_who_was_stopped_answers_nobody_when_it_wakes(start: Start, store: Store) -> None:
    first = start()
    address = Signpost(str(store.job_dir / ADDRESS_FILE)).find()
    assert address is not None
    with tool_channel(str(address)) as waiting:
        os.kill(first.pid, signal.SIGSTOP)
        request = {"op": "set", "key": "epoch", "value": "OQ=="}
        waiting.send(encode_body(request), time.monotonic() + 5)
        start()
        os.kill(first.pid, signal.SIGCONT)
        with pytest.raises(ConnectionError):
            waiting.receive(time.monotonic() + 20)
    assert first.wait(20) == DEPOSED_STATUS
    assert Table(store.open()).get("epoch") is None


def test_an_addition_that_comes_twice_adds_once(store: Store) -> None:
    """As when a store has died before its answer was there: its successor knows the request."""
    totals = []
    for number in range(3):
        totals += asyncio.run(_add_twice(store.lead()[1], f"request{number // 2}"))
    assert totals == [1, 1, 1, 1, 2, 2]


async def _add_twice(table: Table, request: str) -> list[int]:
    async with StoreServer(table, SECRET) as server:
        return await asyncio.to_thread(_send_twice, server.address, request)


def _send_twice(address: str, request: str) -> list[int]:
    frame = {"op": "add", "key": "count", "amount": 1, "request": request}
    until = time.monotonic() + 5
    with tool_channel(address) as asking:
        for _ in range(2):
            asking.send(encode_body(frame), until)
        return [int(asking.receive(until)["number"]) for _ in range(2)]
