"""At the end of an epoch each worker says how far it came, once; who does not is fenced.

Its record is a key of its own, written by compare-and-set from nothing: by the worker, or by a
coordinator that has waited long enough. So all coordinators find the same.
"""

import time
from collections.abc import Awaitable, Callable, Sequence

from megatron_bamboo.agent.job import Deadlines
from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.decision import (
    FENCED_VALUE,
    Fenced,
    Record,
    StepReport,
    parse_record,
)
from megatron_bamboo.membership.table import Table
from megatron_bamboo.membership.workers import node_of


class Records:
    """What workers leave in the store when their epoch ends."""

    def __init__(
        self,
        table: Table,
        members: Members,
        deadlines: Deadlines,
        hear: Callable[[float], Awaitable[bool]],
    ) -> None:
        """``hear`` waits for news until a monotonic time."""
        self._table = table
        self._members = members
        self._deadlines = deadlines
        self._hear = hear

    async def gather(self, epoch: int, survivors: Sequence[str]) -> dict[str, Record | Fenced]:
        """Each surviving worker's record; one that is gone or silent past its time is fenced.

        The time begins when workers can learn that the epoch has ended, and who is fenced learns it
        when that is certain: while the store is away nothing is held against anybody.
        """
        await self._table.kept()
        members, began = self._members, time.monotonic()
        until = {w: began + self.seconds_of(w) for w in members.workers_of(*survivors)}
        # One after the other, whoever answers first: to look at all with each record that comes
        # would take the square of the number of nodes.
        for worker, seconds in until.items():
            while (
                self._table.get(_record_key(epoch, worker)) is None
                and seconds > time.monotonic()
                and node_of(worker) not in members.lost
                and not members.is_worker_done(worker)
            ):
                await self._hear(seconds)
        records = {
            worker: self._fill(epoch, worker)
            for worker in until
            if not members.is_worker_done(worker)
        }
        await self._table.kept()
        return records

    def seconds_of(self, worker: str) -> float:
        """How long a worker's record is waited for."""
        is_ready = self._table.get(f"ready/{worker}") is not None
        return self._deadlines.record_seconds if is_ready else self._deadlines.startup_seconds

    def confirmed(self, epoch: int) -> dict[int, StepReport]:
        """The steps that passed in this epoch. What a worker of an older one wrote late is no
        proof: that step may have been decided otherwise since."""
        reports = map(StepReport.from_json, self._table.items("passed/").values())
        return {report.step: report for report in reports if report.epoch == epoch}

    def _fill(self, epoch: int, worker: str) -> Record | Fenced:
        value = self._table.compare_set(_record_key(epoch, worker), None, FENCED_VALUE)
        assert value is not None
        return parse_record(worker, value)


def _record_key(epoch: int, worker: str) -> str:
    return f"record/{epoch}/{worker}"
