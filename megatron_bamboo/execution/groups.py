"""Free-standing process groups that can be left at any moment.

A group is made from the store under a name of its own, with no world group. gloo has no way to end
a blocked operation from another thread (``abort`` and ``shutdown`` release nobody), but shutting
down the group's sockets does, at once. They are recognised by their addresses: each group has a
listening socket of its own, and its members tell each other where through the store.
"""

import contextlib
import os
import socket
import stat
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_bamboo.execution.errors import PeerLost


class Group(Protocol):
    """What the executor needs of a process group."""

    name: str
    members: tuple[str, ...]
    has_tags: bool
    """Whether messages of a pair match by tag; otherwise in the order of sending."""

    @property
    def backend(self) -> Any:
        """What torch has made of it."""

    def all_reduce(self, tensor: Tensor) -> None:
        """Sum over the members, in place; returns when it is complete."""

    def share(self, parts: Sequence[Tensor]) -> None:
        """Give part i of the member i to all, in place; returns when all are complete."""

    def send(self, tensor: Tensor, peer: str, tag: int) -> dist.Work:
        """Start sending; the tensor must live, unchanged, until the receiver has it."""

    def receive(self, tensor: Tensor, peer: str, tag: int) -> None:
        """Receive into a tensor; returns when it is complete."""

    def release(self) -> None:
        """End every operation of this member, blocked ones included; the group is dead after."""


# How often a waiting collective looks whether its group was released, and how long after that it
# may take to fail by itself: it does so within milliseconds.
_SLICE = timedelta(milliseconds=50)
GIVE_UP_SECONDS = 0.5

Address = tuple[str, int]

# Only the search for a new listening socket needs it: no rendezvous happens inside.
_device_lock = threading.Lock()


class GlooGroup:
    """A group over gloo, for tensors in host memory."""

    has_tags = True

    def __init__(
        self, store: dist.Store, name: str, members: Sequence[str], me: str, timeout: timedelta
    ) -> None:
        self.name = name
        self.members = tuple(members)
        self._released_at: float | None = None
        rank, size = self.members.index(me), len(self.members)
        own = dist.PrefixStore(name, store)
        with self._errors("making the group"):
            self._group, self._address = _connect(own, rank, size, timeout)
            try:
                self._peers = {_address(own.get(f"address{i}")) for i in range(size)}
            except BaseException:
                # An error holds this object, whose threads and sockets must not live as long.
                self._group = None
                raise

    @property
    def backend(self) -> Any:
        return self._group

    def all_reduce(self, tensor: Tensor) -> None:
        with self._errors("all-reduce"):
            self._finish(self._group.allreduce([tensor]))

    def share(self, parts: Sequence[Tensor]) -> None:
        with self._errors("broadcast"):
            for work in _broadcasts(self._group.broadcast, parts):
                self._finish(work)

    def send(self, tensor: Tensor, peer: str, tag: int) -> dist.Work:
        with self._errors("send", peer):
            return self._group.send([tensor], self.members.index(peer), tag)

    def receive(self, tensor: Tensor, peer: str, tag: int) -> None:
        with self._errors("receive", peer):
            self._group.recv([tensor], self.members.index(peer), tag).wait()

    def release(self) -> None:
        if self._released_at is None:
            self._released_at = time.monotonic()
            if self._group is not None:
                bury = threading.Thread(
                    target=_bury, args=([self._group],), name=f"ending-{self.name}", daemon=True
                )
                bury.start()
        for connection in _sockets():
            with connection:
                if self._is_mine(connection):
                    # The peer may have closed it in this very moment.
                    _shut_down(connection)

    def _finish(self, work: dist.Work) -> None:
        """Wait for a collective, in slices.

        A send that fails in gloo's own thread tells nobody who waits for it (one in some hundred
        releases), so once the group is released an operation that does not end is given up. It
        touches its tensor no more: no connection is left to read from.
        """
        while not work.is_completed():
            released = self._released_at
            if released is not None and time.monotonic() > released + GIVE_UP_SECONDS:
                self._give_up()
                raise PeerLost(self.members, f"a collective in {self.name}", None)
            with contextlib.suppress(RuntimeError):  # it takes longer, or has failed: see below
                work.wait(_SLICE)
        work.wait()

    def _give_up(self) -> None:
        """Let a thread end the group: that waits until the operation's own timeout."""
        holder = [self._group]
        self._group = None
        threading.Thread(target=holder.clear, name=f"ending-{self.name}", daemon=True).start()

    def _is_mine(self, connection: socket.socket) -> bool:
        try:
            here, there = connection.getsockname(), connection.getpeername()
        except OSError:  # a listening socket, which must stay
            return False
        return here[:2] == self._address or there[:2] in self._peers

    @contextlib.contextmanager
    def _errors(self, what: str, peer: str | None = None) -> Iterator[None]:
        try:
            yield
        # gloo raises RuntimeError alone; the store has types of its own for a rendezvous, KeyError
        # for one whose keys were deleted since its epoch is over.
        except (RuntimeError, TimeoutError, ConnectionError, KeyError) as error:
            peers = (peer,) if peer is not None else self.members
            raise PeerLost(peers, f"{what} in {self.name}", error) from error


class NcclGroup:
    """A group over NCCL, for tensors on a GPU; messages of a pair match in order, not by tag.

    Waits block the host, since whoever waits here decides by the result.
    """

    has_tags = False

    def __init__(
        self, store: dist.Store, name: str, members: Sequence[str], me: str, timeout: timedelta
    ) -> None:
        self.name = name
        self.members = tuple(members)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        own = dist.PrefixStore(name, store)
        rank = self.members.index(me)
        try:
            self._group = dist.ProcessGroupNCCL(own, rank, len(self.members), options)
        except (RuntimeError, TimeoutError, ConnectionError, KeyError) as error:
            raise PeerLost(self.members, f"making {name}", error) from error

    @property
    def backend(self) -> Any:
        return self._group

    def all_reduce(self, tensor: Tensor) -> None:
        self._wait(self._group.allreduce([tensor]), "all-reduce")

    def share(self, parts: Sequence[Tensor]) -> None:
        for work in _broadcasts(self._group.broadcast, parts):
            self._wait(work, "broadcast")

    def send(self, tensor: Tensor, peer: str, tag: int) -> dist.Work:
        return self._group.send([tensor], self.members.index(peer), 0)

    def receive(self, tensor: Tensor, peer: str, tag: int) -> None:
        self._wait(self._group.recv([tensor], self.members.index(peer), 0), "receive")

    def release(self) -> None:
        self._group.abort()

    def _wait(self, work: dist.Work, what: str) -> None:
        try:
            work.wait()
            torch.cuda.current_stream().synchronize()
        except RuntimeError as error:
            raise PeerLost(self.members, f"{what} in {self.name}", error) from error


def make_group(
    store: dist.Store, name: str, members: Sequence[str], me: str, timeout: timedelta
) -> Group:
    """Make a group on the backend of this machine; every member calls this with equal arguments.

    Raises:
        PeerLost: a member did not come before the store's deadline.
    """
    kind = NcclGroup if torch.cuda.is_available() else GlooGroup
    return kind(store, name, members, me, timeout)


def _broadcasts(broadcast: Callable[..., dist.Work], parts: Sequence[Tensor]) -> list[dist.Work]:
    """Start them all, part i from rank i: they go on side by side."""
    works = []
    for rank, part in enumerate(parts):
        options = dist.BroadcastOptions()
        options.rootRank = rank
        works.append(broadcast([part], options))
    return works


def _bury(holder: list[object]) -> None:
    """Let go of a group as the last: its destructor waits for what is under way, also in vain."""
    while sys.getrefcount(holder[0]) > 2:
        time.sleep(GIVE_UP_SECONDS)
    holder.clear()


def _address(text: bytes) -> Address:
    host, port = text.decode().split()
    return host, int(port)


def _connect(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> tuple[dist.ProcessGroupGloo, Address]:
    """Meet the other members; torch's group, and the address that its connections have here."""
    options = dist.ProcessGroupGloo._Options()
    options._timeout = timeout
    device, address = _new_device()
    options._devices = [device]
    store.set(f"address{rank}", " ".join(map(str, address)))
    return dist.ProcessGroupGloo(store, rank, size, options), address


def _new_device() -> tuple[object, Address]:
    """A gloo device with a listening socket of its own, and that socket's address."""
    with _device_lock:
        before = _listening()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "lo").split(",")[0]
        device = dist.ProcessGroupGloo.create_device(interface=interface)
        (address,) = _listening() - before
    return device, address


def _listening() -> set[Address]:
    addresses = set()
    for candidate in _sockets():
        with candidate:
            if candidate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                addresses.add(candidate.getsockname()[:2])
    return addresses


def _sockets() -> Iterator[socket.socket]:
    """Duplicates of this process's TCP sockets; the caller closes them."""
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            duplicate = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # closed since it was listed
            continue
        if duplicate.family in (socket.AF_INET, socket.AF_INET6):
            yield duplicate
        else:
            duplicate.close()


def _shut_down(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:
        return
