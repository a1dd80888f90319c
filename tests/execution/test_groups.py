"""Groups over gloo: what they carry, and that one can be left at any moment."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from local_peers import TIMEOUT, Beside, make_groups

from megatron_bamboo.agent.limits import GROUP_DESCRIPTORS
from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.groups import GIVE_UP_SECONDS, GlooGroup
from megatron_bamboo.observe.resources import Resources

A_MOMENT = 0.1
AT_ONCE = GIVE_UP_SECONDS + 3.0  # under load, and far below the group's own timeout


@pytest.fixture
def pair() -> Iterator[dict[str, GlooGroup]]:
    groups = make_groups("a", "b")
    yield groups
    for group in groups.values():
        group.release()


def sums(groups: dict[str, GlooGroup], values: list[float]) -> list[float]:
    """What each member has after an all-reduce."""
    tensors = [torch.tensor([value], dtype=torch.float64) for value in values]
    calls = [
        Beside(group.all_reduce, tensor)
        for group, tensor in zip(groups.values(), tensors, strict=True)
    ]
    for call in calls:
        call.join()
    return [tensor.item() for tensor in tensors]


def test_all_members_listen_on_the_interface_that_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    known = {
        name: {address.address for address in addresses if address.family == socket.AF_INET}
        for name, addresses in psutil.net_if_addrs().items()
    }
    for name in [name for name, addresses in known.items() if addresses]:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", name)
        groups = make_groups("a", "b")
        assert {group._address[0] for group in groups.values()} <= known[name]
        for group in groups.values():
            group.release()


def test_a_group_has_no_more_descriptors_than_are_counted() -> None:
    before = Resources.now().descriptors
    groups = make_groups("a", "b", "c")
    after = Resources.now().descriptors
    assert after - before <= 3 * (2 + GROUP_DESCRIPTORS)
    for group in groups.values():
        group.release()


def test_all_members_have_the_sum() -> None:
    groups = make_groups("a", "b", "c")
    assert sums(groups, [1.0, 10.0, 100.0]) == [111.0] * 3
    for group in groups.values():
        group.release()


def test_messages_match_by_tag_and_not_by_order(pair: dict[str, GlooGroup]) -> None:
    sent = {tag: torch.full((1000,), float(tag)) for tag in (1, 2, 3)}
    works = [pair["a"].send(tensor, "b", tag) for tag, tensor in sent.items()]
    for tag in (3, 1, 2):
        received = torch.empty(1000)
        pair["b"].receive(received, "a", tag)
        assert torch.equal(received, sent[tag])
    assert len(works) == 3


def test_both_ends_can_send_at_once(pair: dict[str, GlooGroup]) -> None:
    works = [
        pair[me].send(torch.tensor([n]), peer, 5) for n, me, peer in ((1, "a", "b"), (2, "b", "a"))
    ]
    at_a, at_b = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    pair["a"].receive(at_a, "b", 5)
    pair["b"].receive(at_b, "a", 5)
    assert (at_a.item(), at_b.item(), len(works)) == (2, 1, 2)


def test_release_frees_a_blocked_receive(pair: dict[str, GlooGroup]) -> None:
    blocked = Beside(pair["b"].receive, torch.zeros(1), "a", 1)
    time.sleep(A_MOMENT)
    assert blocked.is_under_way()
    pair["b"].release()
    with pytest.raises(PeerLost) as caught:
        blocked.join(AT_ONCE)
    assert caught.value.peers == ("a",)


def test_release_frees_a_blocked_all_reduce() -> None:
    groups = make_groups("a", "b", "c")
    blocked = [Beside(groups[me].all_reduce, torch.ones(4)) for me in ("a", "b")]
    time.sleep(A_MOMENT)
    assert all(call.is_under_way() for call in blocked)
    for group in groups.values():
        group.release()
    for call in blocked:
        with pytest.raises(PeerLost) as caught:
            call.join(AT_ONCE)
        assert caught.value.peers == ("a", "b", "c")


def test_a_released_group_stays_dead(pair: dict[str, GlooGroup]) -> None:
    pair["a"].release()
    pair["a"].release()
    begin = time.monotonic()
    with pytest.raises(PeerLost):
        pair["a"].all_reduce(torch.ones(1))
    with pytest.raises(PeerLost):
        pair["a"].receive(torch.ones(1), "b", 1)
    assert time.monotonic() - begin < 2 * AT_ONCE


def test_only_the_sockets_of_the_released_group_are_shut(pair: dict[str, GlooGroup]) -> None:
    other = make_groups("a", "b", name="other")
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _address = listener.accept()
    pair["a"].release()
    assert sums(other, [1.0, 2.0]) == [3.0, 3.0]
    with listener, near, far:
        near.sendall(b"still here")
        assert far.recv(16) == b"still here"
        with socket.create_connection(listener.getsockname(), timeout=5):
            pass
    with pytest.raises(PeerLost):
        pair["b"].receive(torch.ones(1), "a", 1)
    for group in other.values():
        group.release()


class Forgetful(dist.Store):
    """Keys of an address are deleted before they are read, as those of an old epoch are."""

    def __init__(self) -> None:
        super().__init__()
        self.values: dict[str, bytes] = {}

    def set(self, key: str, value: bytes | str) -> None:
        self.values[key] = value.encode() if isinstance(value, str) else value

    def get(self, key: str) -> bytes:
        if "address" in key:
            raise KeyError(f"{key} was deleted")
        return self.values[key]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        assert all(key in self.values for key in keys)


def test_a_group_that_cannot_be_made_leaves_nothing_whoever_holds_the_error() -> None:
    store = Forgetful()
    with pytest.raises(PeerLost, match="making the group") as caught:
        GlooGroup(store, "group", ("a",), "a", TIMEOUT)
    host, port = store.values["group/address0"].decode().split()
    until = time.monotonic() + 10
    while any(
        (c.laddr.ip, c.laddr.port) == (host, int(port)) for c in psutil.Process().net_connections()
    ):
        assert time.monotonic() < until, f"{caught.value}, and it still listens"
        time.sleep(0.01)


def test_who_does_not_come_is_a_lost_peer() -> None:
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.3))
    with pytest.raises(PeerLost, match="making the group") as caught:
        GlooGroup(store, "group", ("a", "b"), "a", timedelta(seconds=0.3))
    assert caught.value.peers == ("a", "b")


def live_and_die(file: Path) -> None:
    """A member that sends one message and is killed."""
    group = GlooGroup(dist.FileStore(str(file), 2), "group", ("a", "b"), "b", TIMEOUT)
    work = group.send(torch.full((3,), 7.0), "a", 1)
    group.receive(torch.empty(1), "a", 9)
    assert work is not None
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.multiprocess
def test_a_dead_peer_is_a_lost_peer(tmp_path: Path) -> None:
    child = os.fork()
    if child == 0:
        try:
            live_and_die(tmp_path / "store")
        finally:
            os._exit(1)
    group = GlooGroup(dist.FileStore(str(tmp_path / "store"), 2), "group", ("a", "b"), "a", TIMEOUT)
    received = torch.empty(3)
    group.receive(received, "b", 1)
    assert received.tolist() == [7.0] * 3
    blocked = [Beside(group.receive, torch.empty(3), "b", 2), Beside(group.all_reduce, received)]
    work = group.send(torch.ones(1), "b", 9)
    for call in blocked:
        with pytest.raises(PeerLost):
            call.join(AT_ONCE)
    assert work is not None
    assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
    group.release()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_some_members_share_their_parts_with_all(dtype: torch.dtype) -> None:
    groups = make_groups("a", "b", "c")
    flats = {me: torch.zeros(7, dtype=dtype) for me in groups}
    parts = {me: flat.split([3, 4]) for me, flat in flats.items()}
    parts["a"][0].fill_(-0.0)
    parts["b"][1].fill_(float("nan"))
    calls = [Beside(groups[me].share, parts[me]) for me in groups]
    for call in calls:
        call.join()
    for flat in flats.values():
        assert flat[:3].signbit().all() and flat[3:].isnan().all()
    for group in groups.values():
        group.release()


def test_release_frees_who_waits_for_a_share() -> None:
    groups = make_groups("a", "b", "c")
    blocked = [Beside(groups[me].share, torch.ones(9).split(3)) for me in ("b", "c")]
    time.sleep(A_MOMENT)
    assert all(call.is_under_way() for call in blocked)
    for group in groups.values():
        group.release()
    for call in blocked:
        with pytest.raises(PeerLost):
            call.join(AT_ONCE)


def test_a_share_that_was_broken_in_the_middle_can_be_run_again() -> None:
    size = 4_000_000
    flats = {me: torch.full((2 * size,), -1.0) for me in ("a", "b", "c")}
    own = {"a": torch.randn(size), "b": torch.randn(size)}
    parts = {me: flat.split(size) for me, flat in flats.items()}
    for number, (me, values) in enumerate(own.items()):
        parts[me][number].copy_(values)
    broken = make_groups(*flats, name="broken")
    calls = [Beside(broken[me].share, parts[me]) for me in flats]
    while not any(bool((parts["c"][number] != -1.0).any()) for number in (0, 1)):
        assert any(call.is_under_way() for call in calls)
    for group in broken.values():
        group.release()
    for call in calls:
        with contextlib.suppress(PeerLost):  # who was fast has it all
            call.join(AT_ONCE)
    again = make_groups(*flats, name="again")
    for call in [Beside(again[me].share, parts[me]) for me in flats]:
        call.join()
    for flat in flats.values():
        assert torch.equal(flat, torch.cat(tuple(own.values())))
    for group in again.values():
        group.release()
