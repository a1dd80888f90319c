"""Which standbys have been called, and for which places: all of it is in the store.

A standby builds the stages of the one place that it is called for, and cannot be called again; it
may join in another place of that pipeline. One
that does not get ready must not keep its place for ever: nothing else would protect it.
"""

import json
from collections.abc import Callable
from dataclasses import asdict
from time import monotonic

from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.assignment import called_key
from megatron_bamboo.membership.leaving import GOING
from megatron_bamboo.membership.table import Table
from megatron_bamboo.planner.healing import Vacancy, stages_to_hold
from megatron_bamboo.planner.plan import PipelinePlan, Plan


class Calls:
    """The standbys of a job."""

    def __init__(self, members: Members, table: Table) -> None:
        self._members = members
        self._table = table
        self._called_at: dict[str, float] = {}
        """When this coordinator first knew of those that are not ready."""

    def called(self, plan: Plan) -> dict[str, Vacancy]:
        """By standby that has been called and is in no plan yet, its place; in their order."""
        items = self._table.items(called_key("")).items()
        places = {key.removeprefix(called_key("")): json.loads(text) for key, text in items}
        free = self._free(plan)
        return {
            node: Vacancy(place["pipeline"], place["rank"])
            for node, place in places.items()
            if node in free
        }

    def idle(self, plan: Plan) -> tuple[str, ...]:
        """The standbys that can be called."""
        called = self.called(plan)
        return tuple(node for node in self._free(plan) if node not in called)

    def call(self, node: str, place: Vacancy, pipeline: PipelinePlan) -> None:
        """Let a standby get ready.

        Args:
            pipeline: as it is once the standby is in its place.
        """
        values = {
            "pipeline": place.pipeline,
            "rank": place.rank,
            "stages": stages_to_hold(pipeline, node),
            "shape": asdict(pipeline.shape),
        }
        self._table.set(called_key(node), json.dumps(values).encode())

    def give_up_late(self, plan: Plan, seconds: float) -> None:
        """Take those for lost that were called so long ago and are not ready."""
        now, members = monotonic(), self._members
        late = [node for node in self.called(plan) if not members.is_ready(node)]
        self._called_at = {node: self._called_at.get(node, now) for node in late}
        for node, called_at in self._called_at.items():
            if now - called_at > seconds:
                cause = f"it was called for a place and was not ready within {seconds:g} s"
                members.fence(node, cause)

    def crew(
        self,
        plan: Plan,
        number: int,
        num_stages: int,
        arranged: Callable[[tuple[str, ...]], PipelinePlan],
    ) -> tuple[str, ...]:
        """The standbys that are to become a pipeline, by rank, called if need be; nobody while
        there are too few.

        Args:
            arranged: the pipeline on some nodes, by rank.
        """
        ranks = range(num_stages)
        called = self.called(plan).items()
        crew = {place.rank: node for node, place in called if place.pipeline == number}
        missing = [rank for rank in ranks if rank not in crew]
        idle = self.idle(plan)
        if len(idle) < len(missing):
            return ()
        crew |= dict(zip(missing, idle, strict=False))
        nodes = tuple(crew[rank] for rank in ranks)
        for rank in missing:
            self.call(crew[rank], Vacancy(number, rank), arranged(nodes))
        return nodes

    def _free(self, plan: Plan) -> tuple[str, ...]:
        members = self._members
        return tuple(
            node
            for node in members.waiting_standbys()
            if node not in plan.nodes
            and not members.is_leaving(node)
            # Who has handed over ends as what it is, whatever is said of it since.
            and self._table.get(f"{GOING}{node}") is None
        )
