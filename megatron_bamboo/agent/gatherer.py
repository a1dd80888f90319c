"""Where nobody is left and nodes may come: says so at once, and waits until those who come begin.

A coordinator that waits for nodes can wait for an hour. Whoever looks at the job must see that it
does, how many have come, and how others join; so it is said before anything is waited for, and is
in the store until the next plan is.
"""

import json
import time
from collections.abc import Awaitable, Callable, Mapping, Set

from megatron_bamboo.agent.job import JobSpec
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.restorer import Restorer
from megatron_bamboo.agent.telling import is_new
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import Emitter
from megatron_bamboo.planner.gathering import Gathered, Verdict, decide_beginning
from megatron_bamboo.planner.missing import missing_stages
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.taking_over import NoHolder

AWAITED = "awaited/"
"""Before the number of an epoch after which the job waits for nodes: for how many, and how long."""


class Gatherer:
    """Who begins again, once there is somebody."""

    def __init__(
        self,
        spec: JobSpec,
        members: Members,
        restorer: Restorer,
        table: Table,
        events: Emitter,
        reporter: Reporter,
        hear: Callable[[float], Awaitable[bool]],
    ) -> None:
        """``hear``: waits for news until a monotonic time; whether there was any."""
        self._spec = spec
        self._members = members
        self._restorer = restorer
        self._table = table
        self._events = events
        self._reporter = reporter
        self._hear = hear

    async def gather(
        self, before: Plan, freed: Set[str], error: NoHolder
    ) -> tuple[tuple[str, ...], str]:
        """Those who begin again, and why they do.

        Args:
            freed: the plan's nodes that have handed over.

        Raises:
            NoHolder: the error, where nobody is left and nobody comes in time.
        """
        if nodes := self._restorer.nodes(before, freed):
            return nodes, str(error)
        if not self._restorer.awaits_nodes:
            raise error
        self._say(before, error)
        newest_at, known = time.monotonic(), frozenset[str]()
        until = newest_at + self._spec.deadlines.joining_seconds
        while True:
            nodes, now = self._restorer.nodes(before, freed), time.monotonic()
            if not known >= set(nodes):
                newest_at, known = now, known | set(nodes)
            verdict = self._decide(
                Gathered(len(nodes), self._spec.num_nodes, newest_at, now), until
            )
            if verdict.begins:
                return nodes, f"{error}; {verdict.reason}"
            if not await self._hear(verdict.until) and not nodes:
                raise error

    def _decide(self, seen: Gathered, until: float) -> Verdict:
        return decide_beginning(seen, self._spec.deadlines.gathering_seconds, until)

    def _say(self, before: Plan, error: NoHolder) -> None:
        """Say once, whichever coordinator waits, that the job does."""
        epoch, wanted = before.epoch, self._spec.num_nodes
        seconds = self._spec.deadlines.joining_seconds
        lost = {n: cause for n, cause in self._members.lost.items() if n in before.nodes}
        unheld = list(missing_stages(before, lost.keys(), None))
        with self._table.together():
            if not is_new(self._table, f"{AWAITED}{epoch}"):
                return
            self._table.set(f"{AWAITED}{epoch}", _values(wanted, seconds))
            self._events.emit(
                "waits_for_nodes",
                epoch=epoch,
                lost=sorted(lost),
                unheld=unheld,
                wanted=wanted,
                seconds=seconds,
            )
            what = f"lost {_by_cause(lost)}: {error}" if lost else str(error)
            self._reporter.note(f"{what}; waits up to {seconds:g} s for nodes; {self._how()}")

    def _how(self) -> str:
        """How nodes come."""
        if (seconds := self._spec.respawn_seconds) is not None:
            return f"each lost one is started again {seconds:g} s after its loss"
        return f"they join with bamboo agent --join {self._spec.job_dir / ADDRESS_FILE}"


def _values(wanted: int, seconds: float) -> bytes:
    return json.dumps({"wanted": wanted, "seconds": seconds}).encode()


def _by_cause(lost: Mapping[str, str]) -> str:
    """Each cause once, after all nodes that it has cost."""
    nodes: dict[str, list[str]] = {}
    for node in sorted(lost):
        nodes.setdefault(lost[node], []).append(node)
    return ", ".join(f"{', '.join(names)} ({cause})" for cause, names in nodes.items())
