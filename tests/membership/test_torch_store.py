"""Process groups that rendezvous over the embedded store."""

import contextlib
import threading
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
from server_thread import ServerThread, store_client
from wiretap import Wiretap

from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout

torch = pytest.importorskip("torch")
dist = pytest.importorskip("torch.distributed")

from megatron_bamboo.membership.torch_store import BambooStore, StoreCancelled  # noqa: E402


def store(client: StoreClient, deadline_seconds: float = 5) -> BambooStore:
    return BambooStore(client, "group/3/", deadline_seconds)


def in_thread(call: Callable[[], object]) -> tuple[threading.Thread, list[BaseException]]:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except (RuntimeError, TimeoutError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


def test_torch_speaks_to_it_through_a_prefix(client: StoreClient) -> None:
    own = store(client)
    prefixed = dist.PrefixStore("pair", own)
    prefixed.set("a", b"1")
    assert prefixed.get("a") == b"1"
    assert client.get("group/3/pair/a") == b"1"
    assert prefixed.add("n", 3) == 3
    assert prefixed.check(["a", "n"])
    assert not prefixed.check(["a", "missing"])
    assert prefixed.compare_set("c", "", "first") == b"first"
    assert prefixed.compare_set("c", "", "second") == b"first"
    assert prefixed.compare_set("d", "expected", "second") == b"expected"
    assert prefixed.delete_key("a")
    assert (own.num_keys(), prefixed.num_keys()) == (2, 2)


def test_a_wait_ends_at_the_stores_deadline(client: StoreClient) -> None:
    own = store(client, 0.2)
    begin = time.monotonic()
    with pytest.raises(StoreTimeout, match="group/3/missing"):
        own.get("missing")
    assert 0.2 <= time.monotonic() - begin < 0.8
    own.set_timeout(timedelta(seconds=9))
    assert own.timeout == timedelta(seconds=9)
    with pytest.raises(StoreTimeout):
        own.wait(["missing"], timedelta(seconds=0.1))


def test_a_rendezvous_holds_where_answers_take_long() -> None:
    with contextlib.ExitStack() as ends:
        server = ServerThread()
        ends.callback(server.stop)
        wiretap = ends.enter_context(contextlib.closing(Wiretap(server.address)))
        far = ends.enter_context(contextlib.closing(store_client(wiretap.address, 9)))
        wiretap.to_server = wiretap.to_client = _late
        server.call(server.table.set, "group/3/there", b"1")
        assert store(far, 9).get("there") == b"1"


def _late(piece: bytes) -> bytes:
    time.sleep(0.3)
    return piece


def test_cancel_releases_a_wait_and_forbids_the_rest(client: StoreClient) -> None:
    own = store(client, 30)
    thread, errors = in_thread(lambda: own.get("never"))
    time.sleep(0.1)
    begin = time.monotonic()
    own.cancel()
    thread.join(2)
    assert time.monotonic() - begin < 0.5
    assert [type(error) for error in errors] == [StoreCancelled]
    with pytest.raises(StoreCancelled, match="group/3/"):
        own.set("late", b"1")


def group(own: BambooStore, rank: int, size: int) -> object:
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timedelta(seconds=5)
    options._devices = [dist.ProcessGroupGloo.create_device(interface="lo")]
    return dist.ProcessGroupGloo(dist.PrefixStore("all", own), rank, size, options)


def test_a_group_of_three_forms_and_adds_up(client: StoreClient) -> None:
    sums = []

    def member(rank: int) -> None:
        own, tensor = store(client), torch.full((4,), float(rank + 1))
        group(own, rank, 3).allreduce([tensor]).wait()
        sums.append(tensor.sum().item())

    members = [in_thread(lambda rank=rank: member(rank)) for rank in range(3)]
    for thread, errors in members:
        thread.join(20)
        assert not errors
    assert sums == [24.0] * 3


def test_a_missing_member_is_an_error_at_the_deadline(client: StoreClient) -> None:
    own = store(client, 0.3)
    begin = time.monotonic()
    with pytest.raises(StoreTimeout, match="group/3/all"):
        group(own, 0, 2)
    assert time.monotonic() - begin < 3
