"""What is done to a running job, and seen of it, from outside of it.

Nodes that were stopped are woken when the job has long gone on, and those that were cut off have
their network again, for they must see that they are lost; the coordinator is stopped, and woken
too; and the plans that the store holds at each look are noted.
"""

import contextlib
import os
import signal
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.membership.address import ADDRESS_FILE, Signpost
from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.plan import plan_digest
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.rehearsal.networks import mend
from megatron_bamboo.rehearsal.record import new_events

SOURCE = "bystander"
SLEEP_LEASES = 2.0
"""What was stopped or cut off is woken or mended after so many leases, and some seconds."""
SLEEP_SECONDS = 3.0
_STOPPED_WHOLE = (How.STOP, How.STOP_AGENT)


class Bystander:
    """Looks on while a job runs; to be asked to several times a second.

    Args:
        stops: the steps in which the coordinator is to be stopped, ascending.
    """

    def __init__(self, job_dir: Path, stops: Sequence[int]) -> None:
        self.plans: dict[int, set[str]] = {}
        """By epoch the digests of the plans that the store has held."""
        self._job_dir = job_dir
        self._stops = list(stops)
        self._faults: dict[Path, int] = {}
        self._steps: dict[Path, int] = {}
        self._asleep: list[tuple[float, Callable[[], None]]] = []

    def look(self) -> None:
        """Look once, and do what is due."""
        if not (self._job_dir / JOURNAL_FILE).is_file():
            return
        self._note_plans()
        for event in new_events(self._job_dir / "events", self._faults, "fault"):
            if event["how"] in _STOPPED_WHOLE:
                wake = partial(os.killpg, int(event["group"]), signal.SIGCONT)
                self._wake_later(event["time"], wake)
            if event["how"] == How.CUT:
                self._wake_later(event["time"], partial(mend, int(event["group"])))
        self._stop_coordinator()
        now = time.monotonic()
        for due in [due for due in self._asleep if due[0] <= now]:
            self._asleep.remove(due)
            # It was ended, stopped or not; and if cut off, its network with it.
            with contextlib.suppress(ProcessLookupError, FileNotFoundError):
                due[1]()

    def _note_plans(self) -> None:
        uri = f"file:{self._job_dir / JOURNAL_FILE}?mode=ro"
        query = "SELECT key, value FROM keys WHERE key LIKE 'plan/%'"
        # It may just be made, or locked for a moment: the next look sees as much.
        with (
            contextlib.suppress(sqlite3.OperationalError),
            contextlib.closing(sqlite3.connect(uri, uri=True)) as store,
        ):
            for key, value in store.execute(query):
                epoch = int(key.removeprefix("plan/"))
                self.plans.setdefault(epoch, set()).add(plan_digest(value))

    def _stop_coordinator(self) -> None:
        steps = new_events(self._job_dir / "events", self._steps, "resources")
        newest = max((event["step"] for event in steps), default=0)
        if not self._stops or newest < self._stops[0]:
            return
        self._stops.pop(0)
        address = Signpost(str(self._job_dir / ADDRESS_FILE)).find()
        if address is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.kill(address.pid, signal.SIGSTOP)
            log = EventLog(self._job_dir / "events", SOURCE)
            log.emit("coordinator_stop", step=newest, generation=address.generation)
            log.close()
            self._wake_later(time.monotonic(), partial(os.kill, address.pid, signal.SIGCONT))

    def _wake_later(self, since: float, wake: Callable[[], None]) -> None:
        lease = JobShape.read(self._job_dir).lease_seconds
        self._asleep.append((since + SLEEP_LEASES * lease + SLEEP_SECONDS, wake))
