"""The launcher's care for the coordinator: it starts one, and another when one is needed.

A coordinator that has died is followed by another at once. One that lives but shows no sign of life
may only have been stopped: another is started beside it, and takes its place for good (the
journal's generations see to that). Where that cannot be, since it was stopped with a lock in its
hand, it is ended.
"""

import contextlib
import os
import select
import signal
import sqlite3
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.agent.lead import LOG_FILE, LeadStatus, lead_job, limit_seconds
from megatron_bamboo.agent.nodes import Nodes
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.process import blocked_interrupts, fork
from megatron_bamboo.agent.telling import Teller
from megatron_bamboo.agent.write_trouble import lack_of_room, written_to
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.clock import PatientClock
from megatron_bamboo.membership.journal import LOCK_SECONDS
from megatron_bamboo.membership.keys import Secret
from megatron_bamboo.membership.leadership import Leader
from megatron_bamboo.membership.stores import open_reader

LOOK_SECONDS = 0.05
# So often within so many seconds, and the next one would die as well.
MOST_DEATHS = 5
DEATHS_SECONDS = 60.0
# Once the outcome is there, the coordinator has only to say so to the agents.
GOODBYE_SECONDS = 2.0
# One who was refused has seen a leader; it is looked again whether it is still there.
REFUSED_SECONDS = 1.0


class Supervisor:
    """Keeps a job's coordinator alive until the job is over.

    Args:
        nodes: those of this machine are started again after their loss, if that is asked for.
        must_end: whether the job is to save and end; asked several times a second.
    """

    def __init__(
        self,
        spec: JobSpec,
        secret: Secret,
        teller: Teller,
        nodes: Nodes,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._spec = spec
        self._secret = secret
        self._teller = teller
        self._nodes = nodes
        self._must_end = must_end
        with written_to(spec.job_dir):
            self._reader = open_reader(spec.job_dir)
        self._running: dict[int, int] = {}  # by process id a descriptor that shows its end
        self._given_up: set[int] = set()
        self._newest = 0
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)
        self._last_end = ""
        self._next_start = time.monotonic()
        self._watch = _BeatWatch()
        self._away_since: float | None = None

    def run(self) -> Outcome:
        """Tell what the coordinators say until one has written the job's outcome."""
        try:
            self._teller.tell_again(self._look_back())
            return self._run()
        except (OSError, sqlite3.Error) as error:
            room = lack_of_room(self._spec.job_dir)
            message = f"the job folder or store cannot be used: {error}{room}"
            return Outcome(Status.FAILED, message)

    def close(self) -> None:
        """End all coordinators."""
        for pid in self._running:
            os.kill(pid, signal.SIGKILL)
        for pid, descriptor in self._running.items():
            os.waitpid(pid, 0)
            os.close(descriptor)
        self._running.clear()
        # Where nothing can be changed any more the job has ended of it, and says so.
        with contextlib.suppress(OSError):
            (self._spec.job_dir / ADDRESS_FILE).unlink(missing_ok=True)

    def _run(self) -> Outcome:
        while (outcome := Outcome.read(self._spec.job_dir)) is None:
            leader = self._look()
            if (failure := self._care(leader)) is not None:
                return failure
            self._ask_to_end(leader)
            self._nodes.respawn()
            if self._nodes.failure is not None:
                logs = self._spec.job_dir / "logs"
                message = f"{self._nodes.failure}; look at the logs in {logs}"
                return Outcome(Status.NO_PROGRESS, message)
            self._wait(LOOK_SECONDS)
        until = time.monotonic() + GOODBYE_SECONDS
        while self._runs(self._look()) and time.monotonic() < until:
            self._wait(LOOK_SECONDS)
        self._look()
        return outcome

    def _look_back(self) -> tuple[dict[str, Any], ...]:
        """All that was said before this launcher began."""
        until = self._now() + self._spec.deadlines.store_seconds
        news = self._reader.look()
        facts = news.facts
        while news.is_away:
            if self._now() > until:
                raise TimeoutError("it does not answer")
            self._wait(LOOK_SECONDS)
            news = self._reader.look()
            facts += news.facts
        return facts

    def _look(self) -> Leader | None:
        """Tell what was said since the last look; who leads."""
        news = self._reader.look()
        if news.is_away:
            self._watch.reset()
        self._check_patience(news.is_away)
        self._teller.tell(news.facts)
        self._nodes.hear(news.facts)
        return news.leader

    def _check_patience(self, is_away: bool) -> None:
        """TimeoutError where the store is away for so long that no worker waits for it any more."""
        now, seconds = self._now(), self._spec.deadlines.store_seconds
        self._away_since = (self._away_since or now) if is_away else None
        if self._away_since is not None and now - self._away_since > seconds:
            raise TimeoutError(f"it did not answer for {seconds:g} s")

    def _care(self, leader: Leader | None) -> Outcome | None:
        """Start a coordinator if one is needed; the outcome of a job that cannot have one."""
        if len(self._deaths) == MOST_DEATHS and self._deaths[0] > self._now() - DEATHS_SECONDS:
            log = self._spec.job_dir / "logs" / LOG_FILE
            return Outcome(
                Status.FAILED,
                f"the coordinator died {MOST_DEATHS} times within {DEATHS_SECONDS:.0f} s, at last "
                f"{self._last_end}; see {log}{lack_of_room(self._spec.job_dir)}",
            )
        leads = leader is not None and self._runs(leader) and leader.pid == self._newest
        comes = self._newest in self._running and not leads
        # Who is to take the place of one that holds the lock waits for it.
        silent = self._watch.silent_seconds(None if leader is None else leader.beat)
        is_overdue = silent > limit_seconds(self._spec.shape) + LOCK_SECONDS * comes
        is_there = comes or self._runs(leader)
        if is_overdue or (not is_there and self._now() >= self._next_start):
            self._start()
        return None

    def _ask_to_end(self, leader: Leader | None) -> None:
        """Pass on that the job is to end; often, for who leads may be another one by now."""
        if leader is not None and self._runs(leader) and self._must_end():
            os.kill(leader.pid, signal.SIGUSR1)

    def _start(self) -> None:
        with blocked_interrupts():
            self._newest = fork(lambda: lead_job(self._spec, self._secret))
            self._running[self._newest] = os.pidfd_open(self._newest)
        self._watch.reset()

    def _wait(self, seconds: float) -> None:
        """Wait a little, or until a coordinator has ended."""
        poll = select.poll()
        for descriptor in self._running.values():
            poll.register(descriptor, select.POLLIN)
        ended = {descriptor for descriptor, _ in poll.poll(1000 * seconds)}
        for pid, descriptor in list(self._running.items()):
            if descriptor in ended:
                with blocked_interrupts():
                    status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
                    del self._running[pid]
                    os.close(descriptor)
                self._ended(pid, status)

    def _ended(self, pid: int, status: int) -> None:
        now = self._now()
        if status == LeadStatus.REFUSED:
            self._next_start = now + REFUSED_SECONDS
        if status in (LeadStatus.LED, LeadStatus.DEPOSED, LeadStatus.REFUSED):
            return
        if pid in self._given_up:
            return
        if status == LeadStatus.LOCKED_OUT:
            self._given_up.update(self._running)
            for other in self._running:
                os.kill(other, signal.SIGKILL)
        self._last_end = f"by signal {-status}" if status < 0 else f"with status {status}"
        recent = sum(death > now - DEATHS_SECONDS for death in self._deaths)
        self._deaths.append(now)
        # The first one is followed at once, the others by and by.
        self._next_start = now + recent

    def _runs(self, leader: Leader | None) -> bool:
        return leader is not None and leader.is_here and leader.pid in self._running

    @staticmethod
    def _now() -> float:
        return time.monotonic()


class _BeatWatch:
    """For how long no beat of a leader has come, as this process could have seen it."""

    def __init__(self) -> None:
        self._clock = PatientClock()
        self._beat: float | None = None
        self._since = self._clock.look()

    def silent_seconds(self, beat: float | None) -> float:
        """Take the newest beat; since when it is the newest."""
        now = self._clock.look()
        if beat != self._beat:
            self._beat, self._since = beat, now
        return now - self._since

    def reset(self) -> None:
        """Give a new leader the time to come."""
        self._since = self._clock.look()
