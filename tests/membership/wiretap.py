"""Somebody on the way between a client and a server: hears all, and changes what a test says."""

import contextlib
import socket
import threading
from collections.abc import Callable

Change = Callable[[bytes], bytes]


class Wiretap:
    """Passes connections on to a server, one thread a direction.

    ``to_server`` and ``to_client`` are asked about each piece that passes; ``heard`` is what
    clients have said, connection by connection.
    """

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._server = (host, int(port))
        self._listener = socket.create_server((host, 0))
        self.address = f"{host}:{self._listener.getsockname()[1]}"
        self.to_server: Change = bytes
        self.to_client: Change = bytes
        self.heard: list[bytearray] = []
        self._sockets: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for one in self._sockets:
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(10)
            assert not thread.is_alive()
        for one in self._sockets:
            one.close()

    def _start(self, call: Callable[[], None]) -> None:
        thread = threading.Thread(target=call)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            server = socket.create_connection(self._server)
            self._sockets += [client, server]
            heard = bytearray()
            self.heard.append(heard)
            self._start(lambda c=client, s=server, h=heard: self._pass(c, s, h, "to_server"))  # type: ignore[misc]
            self._start(lambda c=client, s=server: self._pass(s, c, bytearray(), "to_client"))  # type: ignore[misc]

    def _pass(
        self, source: socket.socket, target: socket.socket, heard: bytearray, way: str
    ) -> None:
        with contextlib.suppress(OSError):
            while piece := source.recv(1 << 16):
                heard += piece
                target.sendall(getattr(self, way)(piece))
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)


class FlipOnce:
    """Flips one bit of the piece with this number, counted from 0 since it was made."""

    def __init__(self, number: int, bit: int) -> None:
        self._left, self._bit = number, bit
        self.was_done = False

    def __call__(self, piece: bytes) -> bytes:
        self._left -= 1
        if self._left != -1:
            return piece
        self.was_done = True
        bit = self._bit % (8 * len(piece))
        changed = bytearray(piece)
        changed[bit // 8] ^= 1 << bit % 8
        return bytes(changed)
