"""A network on which everything takes its time: a TUN device for each node, and who forwards.

Kernels without ``netem`` can delay nothing, and gloo's connections go from node to node, so that no
proxy can stand between them. What a node sends comes out of its device as packets, and each is put
into the receiver's so much later.
"""

import fcntl
import heapq
import os
import select
import struct
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType

from namespaces import HUB, INTERFACE, Namespaces, address, enter

TUNSETIFF = 0x400454CA
IFF_TUN, IFF_NO_PI = 0x0001, 0x1000
# Few packets, since each passes through here.
MTU = 16000
OPEN_SECONDS = JOIN_SECONDS = 10.0
_RECEIVER = slice(16, 20)  # of an IPv4 packet


def why_not() -> str | None:
    """Why there can be no such network here; None if there can."""
    try:
        with SlowNetwork(0, 0.0):
            return None
    except (OSError, subprocess.CalledProcessError) as error:
        return f"TUN devices in network namespaces are not permitted here ({error})"


class SlowNetwork(Namespaces):
    """The namespaces of some nodes between which each packet takes some time, in its context."""

    def __init__(self, num_nodes: int, delay_seconds: float) -> None:
        super().__init__(num_nodes)
        self._delay_seconds = delay_seconds
        self._devices: dict[bytes, int] = {}
        self._stopped = threading.Event()
        self._forwarder = threading.Thread(target=self._forward, daemon=True)

    def __enter__(self) -> "SlowNetwork":
        super().__enter__()
        self._forwarder.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._stopped.set()
        self._forwarder.join(JOIN_SECONDS)
        for device in self._devices.values():
            os.close(device)
        super().__exit__(kind, error, traceback)

    def _connect_hub(self) -> None:
        self._connect(HUB)

    def _connect(self, name: str) -> None:
        receiver = bytes(map(int, address(name).split(".")))
        self._devices[receiver] = _open_device(self.prefix, name)
        self._ip(name, "addr", "add", f"{address(name)}/24", "dev", INTERFACE)
        self._ip(name, "link", "set", INTERFACE, "mtu", str(MTU), "up")

    def _forward(self) -> None:
        poll = select.poll()
        for device in self._devices.values():
            poll.register(device, select.POLLIN)
        under_way: list[tuple[float, int, bytes]] = []
        number = 0
        while not self._stopped.is_set():
            wait = min(0.1, max(0.0, under_way[0][0] - time.monotonic())) if under_way else 0.1
            for device, _ in poll.poll(1000 * wait):
                packet = os.read(device, MTU)
                number += 1
                heapq.heappush(under_way, (time.monotonic() + self._delay_seconds, number, packet))
            while under_way and under_way[0][0] <= time.monotonic():
                _, _, packet = heapq.heappop(under_way)
                if (receiver := self._devices.get(packet[_RECEIVER])) is not None:
                    os.write(receiver, packet)


def _open_device(prefix: str, name: str) -> int:
    """A device in a namespace; a thread goes there for it, and does not come back."""

    def open_there() -> int:
        enter(prefix, name)
        device = os.open("/dev/net/tun", os.O_RDWR | os.O_CLOEXEC)
        request = struct.pack("16sH", INTERFACE.encode(), IFF_TUN | IFF_NO_PI)
        try:
            fcntl.ioctl(device, TUNSETIFF, request)
        except OSError:
            os.close(device)
            raise
        return device

    with ThreadPoolExecutor(1) as one:
        return one.submit(open_there).result(OPEN_SECONDS)
