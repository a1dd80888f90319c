"""An agent's watch over its workers, and its word to the coordinator that it is there."""

import os
import select
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_bamboo.agent.hangs import HangJudge
from megatron_bamboo.agent.leases import beat_seconds
from megatron_bamboo.agent.link import CoordinatorLink
from megatron_bamboo.agent.process import WorkerHandle
from megatron_bamboo.cloud.watch import NoticeWatch
from megatron_bamboo.membership.clock import PatientClock
from megatron_bamboo.membership.signs import SignPage
from megatron_bamboo.membership.waits import Wait
from megatron_bamboo.observe.events import EventLog

LOOK_SECONDS = 0.25
"""How often the workers' signs are looked at."""


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
        link: CoordinatorLink,
        workers: Mapping[str, WatchedWorker],
        events: EventLog,
        lease_seconds: float,
        notices: NoticeWatch,
    ) -> None:
        self._link = link
        self._notices = notices
        self._events = events
        self._lease_seconds = lease_seconds
        self._beat_seconds = beat_seconds(lease_seconds)
        self._next_beat = time.monotonic()
        self._clock = PatientClock()
        self._running = dict(workers)
        self._ends = {os.pidfd_open(w.handle.pid): name for name, w in workers.items()}
        self._hangs = False

    def run(self) -> None:
        """Report each worker's end, and one that hangs; return when the job is over for this node.

        This wait has no deadline of its own: the link has one for whoever leads the job.
        """
        while not self._link.is_over():
            self._look_for_hangs()
            if self._link.must_finish:
                for worker in self._running.values():
                    worker.page.ask_to_end()
            for fact in self._notices.take():
                self._events.emit("notices", **fact)
                self._link.report(fact)
            wait = min(LOOK_SECONDS, self._next_beat - time.monotonic())
            for descriptor in self._await(max(0.0, wait)):
                if descriptor in self._ends:
                    self._report_end(descriptor)
                elif self._link.hear_stop():
                    return
            self._beat()

    def _await(self, seconds: float) -> Iterator[int]:
        """What has something to say."""
        poll = select.poll()
        link = self._link.fileno
        for descriptor in (*self._ends, *(() if link is None else (link,))):
            poll.register(descriptor, select.POLLIN)
        return (descriptor for descriptor, _ in poll.poll(1000 * seconds))

    def _beat(self) -> None:
        """Say that this node is there, if it is time to."""
        if time.monotonic() >= self._next_beat:
            self._next_beat = time.monotonic() + self._beat_seconds
            places = {name: worker.judge.place for name, worker in self._running.items()}
            self._link.beat(places, list(self._long_waits()))

    def _long_waits(self) -> Iterator[Wait]:
        """The waits that are worth telling; shorter ones decide nothing."""
        for name, worker in self._running.items():
            wait = worker.judge.wait(name)
            if wait is not None and wait.seconds > self._lease_seconds:
                yield wait

    def _look_for_hangs(self) -> None:
        """Where a worker hangs, end all of this node's and report it, once."""
        if self._hangs:
            return
        now = self._clock.look()
        for name, worker in self._running.items():
            if (cause := worker.look(now)) is not None:
                self._hangs = True
                self._events.emit("hang", worker=name, cause=cause)
                sys.stderr.write(f"{name}: {cause}\n")
                self._link.report({"op": "hung", "cause": cause})
                break
        if self._hangs:
            for worker in self._running.values():
                worker.handle.kill()

    def _report_end(self, descriptor: int) -> None:
        os.close(descriptor)
        name = self._ends.pop(descriptor)
        worker = self._running.pop(name).handle
        status = worker.poll()
        self._events.emit("worker_exited", worker=name, pid=worker.pid, status=status)
        self._link.report({"op": "exited", "worker": name, "status": status})
