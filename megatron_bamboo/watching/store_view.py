"""A look into a job's folder: what its store holds at one moment, read without touching it.

The store is opened for reading only, and only for the time of a look: whoever watches can neither
hold up a coordinator nor change anything. A journal is to be read on its coordinator's machine.
"""

import math
import sqlite3
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from megatron_bamboo.agent.gatherer import AWAITED
from megatron_bamboo.agent.job import JOB_FILE, JobShape
from megatron_bamboo.agent.job_folder import preparer
from megatron_bamboo.agent.lead import limit_seconds
from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.agent.report import REPORTED_KEY
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE, Address, Signpost
from megatron_bamboo.membership.clock import boot_time
from megatron_bamboo.membership.etcd_client import EtcdAway
from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.membership.leadership import Leader, is_alive
from megatron_bamboo.membership.leaving import DRAINED, GOING, NOTICED
from megatron_bamboo.membership.stores import StoreSnapshot, snapshot_of
from megatron_bamboo.watching.history import History

RECENT_STEPS = 20
"""So many of the newest steps' reports are read."""
_PREFIXES = ("agent/", "called/", "finished/", "ready/", NOTICED, GOING, DRAINED)


@dataclass(frozen=True, slots=True)
class StoreView:
    """What there is to be seen of a job at one moment."""

    folder: str
    shape: JobShape
    keys: Mapping[str, bytes]
    """Those of the store that tell of the plan in force, of nodes and of recent steps."""
    history: History
    leader: Leader | None
    """Who leads or led last; None before anyone has."""
    silent_seconds: float
    """How old its last sign of life is."""
    leader_is_there: bool
    """Its process is."""
    leader_leads: bool
    """Its last sign of life is no older than it may be."""
    address: Address | None
    """Where the coordinator is to be found; None where nobody has said it, or not any more."""
    outcome: Outcome | None

    def under(self, prefix: str) -> dict[str, bytes]:
        """What the keys with a prefix hold, by the rest of their names."""
        found = ((key, value) for key, value in self.keys.items() if key.startswith(prefix))
        return {key.removeprefix(prefix): value for key, value in found}


class StoreWatcher:
    """Looks into one job's folder again and again; each fact is read once."""

    def __init__(self, job_dir: Path) -> None:
        self._job_dir = job_dir.absolute()
        self._folder = str(job_dir)
        self._number = 0
        self._history = History()

    def look(self) -> StoreView:
        """What is there now.

        Raises:
            UserError: there is no job, or its store cannot be read from here.
        """
        if not (self._job_dir / JOB_FILE).is_file():
            if (who := preparer(self._job_dir)) is not None:
                raise UserError(
                    f"the job in {self._folder} is being prepared ({who}): look again when that "
                    "says that it waits for nodes, or that it has started"
                )
            raise UserError(
                f"there is no job in {self._folder}: give the folder that bamboo run or bamboo "
                "coordinator names in its first lines"
            )
        shape = JobShape.read(self._job_dir)
        # The outcome first: it is the last that is written, and what is read then is the end.
        outcome = Outcome.read(self._job_dir)
        leader, keys = self._read_store()
        return StoreView(
            folder=self._folder,
            shape=shape,
            keys=keys,
            history=self._history,
            leader=leader,
            silent_seconds=0.0 if leader is None else boot_time() - leader.beat,
            leader_is_there=leader is not None and is_alive(leader, math.inf),
            leader_leads=leader is not None and is_alive(leader, limit_seconds(shape)),
            address=Signpost(str(self._job_dir / ADDRESS_FILE)).find(),
            outcome=outcome,
        )

    def _read_store(self) -> tuple[Leader | None, dict[str, bytes]]:
        try:
            with snapshot_of(self._job_dir) as store:
                if store is None:
                    return None, {}
                self._number, facts = store.facts(self._number)
                self._history = self._history.after(facts)
                return store.leader(), _keys(store)
        except sqlite3.DatabaseError as error:
            path = self._job_dir / JOURNAL_FILE
            raise UserError(
                f"{path} cannot be read here ({error}): look at the job on the machine where its "
                "coordinator runs, as a user who may read its folder"
            ) from error
        except EtcdAway as error:
            raise UserError(f"the store of {self._folder} cannot be read: {error}") from error


def _keys(store: StoreSnapshot) -> dict[str, bytes]:
    """The keys that tell of the plan in force, of the nodes, and of the newest steps."""
    keys = {key: value for prefix in _PREFIXES for key, value in store.items(prefix).items()}
    names = []
    if (epoch := store.get("epoch")) is not None:
        names += [f"plan/{int(epoch)}", f"{AWAITED}{int(epoch)}"]
    if (reported := store.get(REPORTED_KEY)) is not None:
        newest = int(reported)
        names += [f"passed/{step}" for step in range(newest - RECENT_STEPS + 1, newest + 1)]
    found = ((name, store.get(name)) for name in ("epoch", REPORTED_KEY, *names))
    return keys | {name: value for name, value in found if value is not None}
