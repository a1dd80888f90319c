"""An agent's watch over its workers, and its word to the coordinator that it is there."""

import os
import selectors
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_bamboo.agent.hangs import HangJudge
from megatron_bamboo.agent.leases import FIRST_WORD, beat_seconds
from megatron_bamboo.agent.process import WorkerHandle
from megatron_bamboo.membership.clock import PatientClock
from megatron_bamboo.membership.frames import encode_frame, receive_frame
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.observe.events import EventLog

LOOK_SECONDS = 0.25
"""How often the workers' signs are looked at."""

# A frame that has begun to arrive is whole within this time, and one is taken within it.
FRAME_SECONDS = 5.0


def send(link: socket.socket, message: Mapping[str, Any]) -> None:
    """Send one message; TimeoutError where it is not taken."""
    link.settimeout(FRAME_SECONDS)
    link.sendall(encode_frame(message))


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """A worker, what it shows, and what is made of it."""

    handle: WorkerHandle
    page: SignPage
    judge: HangJudge

    def look(self, now: float) -> str | None:
        """Why it hangs; None if it does not."""
        return self.judge.look(self.page.read(), busy_seconds(self.handle.pid), now)


def busy_seconds(pid: int) -> float:
    """The processor time of a process; that of one that is gone does not grow."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class NodeWatch:
    """Watches one node's workers until its job is over."""

    def __init__(
        self,
        link: socket.socket,
        workers: Mapping[str, WatchedWorker],
        events: EventLog,
        lease_seconds: float,
    ) -> None:
        self._link = link
        self._events = events
        self._beat_seconds = beat_seconds(lease_seconds)
        self._next_beat = time.monotonic()
        self._word = FIRST_WORD
        self._clock = PatientClock()
        self._running = dict(workers)

    def run(self) -> None:
        """Report each worker's end; return when the coordinator says stop or is gone, or when a
        worker hangs.

        This wait has no deadline of its own: the coordinator's process ending ends it.
        """
        with selectors.DefaultSelector() as selector:
            selector.register(self._link, selectors.EVENT_READ, data="")
            for name, worker in self._running.items():
                pidfd = os.pidfd_open(worker.handle.pid)
                selector.register(pidfd, selectors.EVENT_READ, data=name)
            while not self._hangs():
                wait = min(LOOK_SECONDS, self._next_beat - time.monotonic())
                for key, _ in selector.select(max(0.0, wait)):
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
            places = {name: worker.judge.place for name, worker in self._running.items()}
            send(self._link, {"op": "alive", "word": self._word, "places": places})

    def _hangs(self) -> bool:
        """Whether a worker hangs; the coordinator is told."""
        now = self._clock.look()
        for name, worker in self._running.items():
            if (cause := worker.look(now)) is not None:
                self._events.emit("hang", worker=name, cause=cause)
                sys.stderr.write(f"{name}: {cause}\n")
                send(self._link, {"op": "hung", "cause": cause})
                return True
        return False

    def _report_end(self, name: str) -> None:
        worker = self._running.pop(name).handle
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
