"""An agent's watch over its workers, and its word to the coordinator that it is there."""

import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from typing import Any

from megatron_bamboo.agent.leases import FIRST_WORD, beat_seconds
from megatron_bamboo.agent.process import WorkerHandle
from megatron_bamboo.membership.frames import encode_frame, receive_frame
from megatron_bamboo.observe.events import EventLog

# A frame that has begun to arrive is whole within this time, and one is taken within it.
FRAME_SECONDS = 5.0


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; TimeoutError where it is not taken."""
    link.settimeout(FRAME_SECONDS)
    link.sendall(encode_frame(message))


class NodeWatch:
    """Watches one node's workers until its job is over."""

    def __init__(
        self,
        link: socket.socket,
        workers: Mapping[str, WorkerHandle],
        events: EventLog,
        lease_seconds: float,
    ) -> None:
        self._link = link
        self._workers = workers
        self._events = events
        self._beat_seconds = beat_seconds(lease_seconds)
        self._next_beat = time.monotonic()
        self._word = FIRST_WORD

    def run(self) -> None:
        """Report each worker's end; return when the coordinator says stop or is gone.

        This wait has no deadline of its own: the coordinator's process ending ends it.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ, data="")
            for name, worker in self._workers.items():
                selector.register(os.pidfd_open(worker.pid), selectors.EVENT_READ, data=name)
            while True:
                for key, _ in selector.select(max(0.0, self._next_beat - time.monotonic())):
                    if key.data:
                        selector.unregister(key.fileobj)
                        self._report_end(key.data)
                    elif self._is_over():
                        return
                self._beat()

    def _beat(self) -> None:
        """Say that this node is there, if it is time to."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._beat_seconds
            send(self._link, {"op": "alive", "word": self._word})

    def _report_end(self, name: str) -> None:
        worker = self._workers[name]
        status = worker.poll()
        self._events.emit("worker_exited", worker=name, pid=worker.pid, status=status)
        send(self._link, {"op": "exited", "worker": name, "status": status})

    def _is_over(self) -> bool:
        try:
            message = receive_frame(self._link, time.monotonic() + FRAME_SECONDS)
        except OSError:
            self._events.emit("coordinator_gone")
            return True
        match message:
            case {"op": "heard", "word": str(word)}:
                self._word = word
            case {"op": "stop", "cause": cause}:
                self._events.emit("fenced", cause=cause)
                sys.stderr.write(f"this node was declared lost: {cause}\n")
                return True
            case {"op": "stop"}:
                return True
        return False
