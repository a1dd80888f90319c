"""How a worker learns where it belongs: from the first plan, or as a standby when it is called.

A standby is called with the stages that it will hold, builds them while the others train, says
that it is ready, and joins with the plan that names it.
"""

import json
from collections.abc import Callable
from typing import Any

from megatron_bamboo.membership.leaving import RELEASED
from megatron_bamboo.membership.restores import GoBack
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.planner.healing import stages_to_hold
from megatron_bamboo.planner.plan import Plan

_POLL_SECONDS = 2.0


def called_key(node: str) -> str:
    """Where a standby finds the stages that it is to build."""
    return f"called/{node}"


def joined_key(node: str) -> str:
    """Where a standby finds the epoch whose plan names it."""
    return f"joined/{node}"


class Assignment:
    """One worker's place in the job.

    Args:
        read_plan: a published plan as the workers of this tensor rank see it.
        restored: the plan by which all begin again, this worker among them; None for the first.
    """

    def __init__(
        self,
        client: StoreClient,
        worker: str,
        read_plan: Callable[[bytes], Plan],
        restored: Plan | None = None,
    ) -> None:
        self._client = client
        self._worker = worker
        self._read_plan = read_plan
        # It comes when as many nodes are there as are wanted, however long that takes.
        self._plan: Plan | None = restored or read_plan(self._await("plan/0"))
        self.is_standby = worker not in self._plan.nodes
        self.pipeline = -1
        """The number of its pipeline, once ``stages()`` has said it."""
        self.shape: PipelineShape | None = None
        """What that pipeline is, likewise."""
        self.in_force: Plan | None = None
        """Of a standby: the plan in which it was called, once ``stages()`` has said it."""
        if self.is_standby:
            self._plan = None

    def stages(self) -> tuple[int, ...]:
        """The stages to build; a standby waits here until it is called.

        Raises:
            GoBack: it is called to begin again with all others.
        """
        if self._plan is None:
            called: dict[str, Any] = json.loads(self._await(called_key(node_of(self._worker))))
            if self._client.get(joined_key(node_of(self._worker))) is not None:
                self._join()
            self.pipeline = called["pipeline"]
            self.shape = PipelineShape.from_fields(called["shape"])
            self.in_force = self._find_plan()
            return tuple(called["stages"])
        self.pipeline = self._plan.pipeline_of(self._worker)
        pipeline = self._plan.pipelines[self.pipeline]
        self.shape = pipeline.shape
        return stages_to_hold(pipeline, self._worker)

    def plan(self) -> Plan:
        """The plan to begin with; a standby says that it is ready, and waits until it is named.

        Raises:
            GoBack: it names a state from which all begin again, whatever this one has built.
        """
        if self._plan is None:
            self._client.set(f"ready/{self._worker}", b"1")
            self._plan = self._join()
        return self._plan

    def await_release(self) -> None:
        """Wait, in no place any more, until nobody needs anything of this node."""
        self._await(f"{RELEASED}{node_of(self._worker)}")

    def _join(self) -> Plan:
        """The plan that names this standby, once there is one."""
        epoch = int(self._await(joined_key(node_of(self._worker))))
        published = self._client.get(f"plan/{epoch}")
        assert published is not None
        plan = self._read_plan(published)
        if plan.restored is not None:
            raise GoBack(plan)
        return plan

    def _find_plan(self) -> Plan:
        """The plan in force; one that is another's by now may be forgotten just then."""
        published = None
        while published is None:
            epoch = int(self._await("epoch"))
            published = self._client.get(f"plan/{epoch}")
        return Plan.from_json(published)

    def _await(self, key: str) -> bytes:
        """Wait for as long as the job lasts: its end, or that of the store, ends this worker."""
        while True:
            try:
                self._client.wait([key], _POLL_SECONDS)
            except StoreTimeout:
                continue
            value = self._client.get(key)
            assert value is not None
            return value
