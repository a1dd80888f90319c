"""Networks of their own for the nodes of a job on one machine, so that one of them can be cut off.

The launching process moves to a network namespace in which those of the nodes meet at a bridge, and
each node makes its own and joins. No namespace has a name, so each ends with its processes, however
those end, and nothing of the machine's own network is touched. A node takes down its own link: from
then on what is sent from or to it is lost, and no connection closes.
"""

import contextlib
import ctypes
import fcntl
import os
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

LINK = "bamboo0"
"""A node's interface. No machine's own has that name, so that no other is ever taken down."""
HUB_ADDRESS = "10.97.0.1"
_BRIDGE = "hub"
_OWN = "/proc/thread-self/ns/net"
_CLONE_NEWNET = 0x40000000
_SIOCGIFFLAGS, _SIOCSIFFLAGS, _IFF_UP = 0x8913, 0x8914, 0x1
_IP_SECONDS = 30.0
_libc = ctypes.CDLL(None, use_errno=True)


def why_not() -> str | None:
    """Why nodes cannot have networks of their own on this machine; None if they can."""

    def try_it() -> None:
        with hub():
            _ip(f"link add {LINK} type veth peer name node0 master {_BRIDGE}")

    try:
        _in_thread(try_it)
    except (OSError, subprocess.SubprocessError) as error:
        return f"only root can give each node a network of its own, with ip of iproute2 ({error})"
    return None


@contextlib.contextmanager
def hub() -> Iterator[None]:
    """Within it this thread, and what it starts, is where the networks of nodes meet."""
    before = os.open(_OWN, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _unshare()
        try:
            _ip(
                "link set lo up",
                f"link add {_BRIDGE} type bridge",
                f"addr add {HUB_ADDRESS}/16 dev {_BRIDGE}",
                f"link set {_BRIDGE} up",
            )
            yield
        finally:
            _enter(before)
    finally:
        os.close(before)


def join_hub(number: int, hub_pid: int) -> None:
    """Move this thread, and what it will start, to a network of its own that is joined to a hub.

    Args:
        number: that no other node of the hub has had, from 1.
        hub_pid: a process in the hub.
    """
    _unshare()
    _ip(
        "link set lo up",
        f"link add {LINK} type veth peer name node{number} netns {hub_pid}",
        f"addr add {_address(number)}/16 dev {LINK}",
        f"link set {LINK} up",
    )
    _within(hub_pid, lambda: _ip(f"link set node{number} master {_BRIDGE} up"))


def cut_off() -> None:
    """Cut this process's node off from all others; OSError where it has no network of its own."""
    _set_link(is_up=False)


def mend(pid: int) -> None:
    """Undo that for the node of a process; OSError where that has ended."""
    _within(pid, lambda: _set_link(is_up=True))


def _address(number: int) -> str:
    high, low = divmod(number + 1, 256)
    assert number >= 1 and high < 255, f"there is no address for node {number}"
    return f"10.97.{high}.{low}"


def _set_link(is_up: bool) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        form = "16sh14x"
        asked = struct.pack(form, LINK.encode(), 0)
        _, flags = struct.unpack(form, fcntl.ioctl(any_socket, _SIOCGIFFLAGS, asked))
        flags = flags | _IFF_UP if is_up else flags & ~_IFF_UP
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack(form, LINK.encode(), flags))


def _within(pid: int, call: Callable[[], None]) -> None:
    """Call this in the network of a process. A thread changes its network by itself alone."""

    def enter_and_call() -> None:
        descriptor = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY | os.O_CLOEXEC)
        try:
            _enter(descriptor)
        finally:
            os.close(descriptor)
        call()

    _in_thread(enter_and_call)


def _in_thread(call: Callable[[], None]) -> None:
    with ThreadPoolExecutor(1) as threads:
        threads.submit(call).result()


def _unshare() -> None:
    _check(_libc.unshare(_CLONE_NEWNET))


def _enter(descriptor: int) -> None:
    _check(_libc.setns(descriptor, _CLONE_NEWNET))


def _check(returned: int) -> None:
    if returned != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def _ip(*commands: str) -> None:
    done = subprocess.run(
        ["ip", "-batch", "-"],
        input="\n".join(commands),
        capture_output=True,
        text=True,
        timeout=_IP_SECONDS,
    )
    if done.returncode != 0:
        raise OSError(f"ip says: {' | '.join(done.stderr.splitlines())}")
