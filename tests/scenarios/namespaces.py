"""Machines in miniature: a network namespace for each node, joined by a bridge in another.

Nothing of the host's own network is touched. Taking down a node's link closes no connection, and
cutting the way from one node to another neither.
"""

import ctypes
import os
import subprocess

HUB = "hub"
INTERFACE = "eth0"
BRIDGE = "br0"
CLONE_NEWNET = 0x40000000
# A hardware address that nobody has.
NOBODY = "02:00:00:00:00:01"


def why_not() -> str | None:
    """Why there can be no namespaces here; None if there can."""
    try:
        with Namespaces(0):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"network namespaces are not permitted here ({error})"


class Namespaces:
    """The namespaces of some nodes, within its context."""

    def __init__(self, num_nodes: int) -> None:
        self.prefix = f"bb{os.getpid()}-"
        self._nodes = [f"node{number}" for number in range(num_nodes)]
        self._made: list[str] = []

    def __enter__(self) -> "Namespaces":
        try:
            self._make(HUB)
            self._connect_hub()
            for node in self._nodes:
                self._make(node)
                self._connect(node)
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._remove()

    def silence(self, node: str) -> None:
        """Take a node's link down: what is sent from or to it is lost."""
        self._ip(HUB, "link", "set", node, "down")

    def restore(self, node: str) -> None:
        """Take a node's link up again."""
        self._ip(HUB, "link", "set", node, "up")

    def cut(self, sender: str, receiver: str) -> None:
        """Let what a node, or the hub, sends to another be lost, and nothing else."""
        device = BRIDGE if sender == HUB else INTERFACE
        lost = ("lladdr", NOBODY, "dev", device, "nud", "permanent")
        self._ip(sender, "neigh", "replace", address(receiver), *lost)

    def mend(self, sender: str, receiver: str) -> None:
        """Undo a cut."""
        device = BRIDGE if sender == HUB else INTERFACE
        self._ip(sender, "neigh", "del", address(receiver), "dev", device)

    def _connect_hub(self) -> None:
        self._ip(HUB, "link", "add", BRIDGE, "type", "bridge")
        self._ip(HUB, "addr", "add", f"{address(HUB)}/24", "dev", BRIDGE)
        self._ip(HUB, "link", "set", BRIDGE, "up")

    def _connect(self, node: str) -> None:
        peer = ("peer", "name", INTERFACE, "netns", self.prefix + node)
        self._ip(HUB, "link", "add", node, "type", "veth", *peer)
        self._ip(HUB, "link", "set", node, "master", "br0")
        self._ip(HUB, "link", "set", node, "up")
        self._ip(node, "addr", "add", f"{address(node)}/24", "dev", INTERFACE)
        self._ip(node, "link", "set", INTERFACE, "up")

    def _make(self, name: str) -> None:
        _run("ip", "netns", "add", self.prefix + name)
        self._made.append(name)
        self._ip(name, "link", "set", "lo", "up")

    def _remove(self) -> None:
        for name in self._made:
            _run("ip", "netns", "del", self.prefix + name)
        self._made.clear()

    def _ip(self, name: str, *words: str) -> None:
        _run("ip", "-n", self.prefix + name, *words)


def address(name: str) -> str:
    """The address of the hub or a node."""
    return f"10.97.0.{1 if name == HUB else 10 + int(name.removeprefix('node'))}"


def enter(prefix: str, name: str) -> None:
    """Move this process, and what it will start, to a namespace."""
    descriptor = os.open(f"/run/netns/{prefix}{name}", os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, CLONE_NEWNET) != 0:
            raise OSError(ctypes.get_errno(), f"cannot enter {prefix}{name}")
    finally:
        os.close(descriptor)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, timeout=30, stderr=subprocess.PIPE)
