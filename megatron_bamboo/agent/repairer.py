"""Who becomes a pipeline all of whose nodes are lost, so that it goes on with another one's state.

The others stand still meanwhile: who has which microbatch must not change. So it is standbys that
are there already, and they have only to build what they will run.
"""

import time
from collections.abc import Awaitable, Callable, Set
from functools import partial

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.planner.repairing import deserted, manned


class Repairer:
    """The standbys for pipelines without live nodes.

    Args:
        seconds: how long all others may wait for them to get ready.
        hear: waits for news until a monotonic time.
    """

    def __init__(
        self,
        members: Members,
        calls: Calls,
        seconds: float,
        hear: Callable[[float], Awaitable[bool]],
    ) -> None:
        self._members = members
        self._calls = calls
        self._seconds = seconds
        self._hear = hear

    async def crews(
        self, plan: Plan, lost: Set[str], decision: StepDecision
    ) -> dict[int, tuple[str, ...]]:
        """By pipeline that has lost all its nodes, the standbys that are ready to become it; of
        one for which there are too few, nothing."""
        until = time.monotonic() + self._seconds
        numbers = deserted(plan, lost, decision)
        while True:
            crews = {number: crew for number in numbers if (crew := self._crew(plan, number))}
            nodes = [node for crew in crews.values() for node in crew]
            if all(map(self._members.is_ready, nodes)):
                return crews
            if not await self._hear(until):
                return {
                    number: crew
                    for number, crew in crews.items()
                    if all(map(self._members.is_ready, crew))
                }

    def _crew(self, plan: Plan, number: int) -> tuple[str, ...]:
        size = plan.pipelines[number].shape.num_stages
        return self._calls.crew(plan, number, size, partial(manned, plan, number))
