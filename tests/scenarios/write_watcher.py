"""Watches what a job's store is told of plans and decisions: every write, whoever makes it.

It is no part of the coordinator: triggers in the store's file note each change of such a key in the
very transaction that makes it, so that a second write is seen even if nobody ever read the first.
"""

import contextlib
import sqlite3
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from forked_jobs import JOB_SECONDS, FinishedJob, RunningJob, last_words

from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.planner.plan import plan_digest

WATCHED = ("plan/", "ending/", "epoch", "record/")
LOCK_SECONDS = 5.0
_TABLE = "CREATE TABLE watched (number INTEGER PRIMARY KEY, change TEXT, key TEXT, value BLOB)"


@dataclass(frozen=True, slots=True)
class Write:
    """A change of a key: ``INSERT``, ``UPDATE`` or ``DELETE``."""

    change: str
    key: str
    value: bytes


class WriteWatcher:
    """Watches one job, from soon after its start on; what was written until then is noted as it
    is."""

    def __init__(self, job: RunningJob) -> None:
        self._path = job.request.job_dir / JOURNAL_FILE
        until = time.monotonic() + JOB_SECONDS
        while not self._install():
            if time.monotonic() > until or job.ended.is_set():
                raise RuntimeError(f"there was no {self._path}\n{last_words(job.request)}")
            time.sleep(0.001)

    def writes(self) -> list[Write]:
        """All of them, in their order."""
        with contextlib.closing(sqlite3.connect(self._path, timeout=LOCK_SECONDS)) as db:
            rows = db.execute("SELECT change, key, value FROM watched ORDER BY number").fetchall()
        return [Write(*row) for row in rows]

    def complaints(self, job: FinishedJob, epochs: range) -> Iterator[str]:
        """What was written twice, or out of turn; and who knows another plan of an epoch.

        Args:
            epochs: those that the job may have ended in.
        """
        writes = self.writes()
        made = Counter(w.key for w in writes if w.change != "DELETE" and w.key != "epoch")
        yield from (f"{key} was written {n} times" for key, n in made.items() if n > 1)
        plans = {w.key: plan_digest(w.value) for w in writes if w.key.startswith("plan/")}
        order = [int(write.value) for write in writes if write.key == "epoch"]
        if order != list(range(len(plans))) or list(plans) != [f"plan/{e}" for e in order]:
            yield f"the plans {list(plans)} and the epochs {order} are out of turn"
        if not order or order[-1] not in epochs:
            yield f"it came to epochs {order}, not to one of {list(epochs)}"
        known = {(f"plan/{e['epoch']}", e["digest"]) for e in _plan_events(job)}
        for key, digest in known - set(plans.items()):
            yield f"of {key} somebody knows {digest}, and the store {plans.get(key)}"

    def _install(self) -> bool:
        """Make the triggers, once there is something to watch."""
        if not self._path.is_file():
            return False
        with contextlib.closing(sqlite3.connect(self._path, timeout=LOCK_SECONDS)) as db:
            db.isolation_level = None
            db.execute("BEGIN IMMEDIATE")
            found = db.execute("SELECT 1 FROM sqlite_master WHERE name = 'keys'").fetchone()
            if found is not None:
                db.execute(_TABLE)
                watched = " OR ".join(f"{{0}}.key LIKE '{prefix}%'" for prefix in WATCHED)
                db.execute(
                    "INSERT INTO watched (change, key, value) SELECT 'INSERT', key, value "
                    f"FROM keys WHERE {watched.format('keys')} ORDER BY rowid"
                )
                for change, row in (("INSERT", "NEW"), ("UPDATE", "NEW"), ("DELETE", "OLD")):
                    db.execute(
                        f"CREATE TRIGGER watch_{change} AFTER {change} ON keys "
                        f"WHEN {watched.format(row)} BEGIN INSERT INTO watched "
                        f"(change, key, value) VALUES ('{change}', {row}.key, {row}.value); END"
                    )
            db.execute("COMMIT")
        return found is not None


def _plan_events(job: FinishedJob) -> list[dict[str, object]]:
    """What workers and coordinator have logged of plans."""
    events = read_events(job.job_dir / "events")
    return [event for event in events if event["event"] == "plan"]
