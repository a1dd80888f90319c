"""Which standbys take the places of nodes that are to leave, while these are still there.

A standby is called as soon as a node is noticed, and gets ready while all others train. The node
waits for it as long as it has the time to; after that its shadow runs its stage.
"""

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.ending import Standby
from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.leaving import Notice
from megatron_bamboo.planner.draining import place_of, without
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.plan import Plan

UNKNOWN_SECONDS = 30.0
"""What a node has from its notice on where nobody says: the least that a cloud gives."""
WAITING_SHARE = 0.5
"""How much of its time a node waits for a standby; in the rest the job can go on without one."""


@dataclass(frozen=True, slots=True)
class Replacements:
    """What becomes of leaving nodes where there are standbys."""

    ready: tuple[Standby, ...]
    waiting: frozenset[str]
    """Those whose standby gets ready."""


class Replacer:
    """Calls standbys for the places of leaving nodes."""

    def __init__(
        self, members: Members, calls: Calls, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._members = members
        self._calls = calls
        self._now = now
        self._since: dict[str, float] = {}  # another coordinator gives them their time anew

    def noticed(self, node: str) -> None:
        """A node's time counts from its newest word on: what an earlier one gave it is over."""
        self._since[node] = self._now()

    def look(self, plan: Plan, leaving: Mapping[str, Notice]) -> Replacements:
        """Who is ready, and who waits; free standbys are called.

        Args:
            leaving: by node of the plan its notice, the most urgent ones first.
        """
        called = {place: node for node, place in self._calls.called(plan).items()}
        ready, waiting = [], set()
        for node, notice in leaving.items():
            place = place_of(plan, node)
            standby = called.get(place) or self._call(plan, node, place)
            if standby is None:
                continue
            if self._members.is_ready(standby):
                ready.append((place, standby))
            elif self._has_time(node, notice):
                waiting.add(node)
        return Replacements(tuple(ready), frozenset(waiting))

    def _call(self, plan: Plan, node: str, place: Vacancy) -> str | None:
        """The standby that is called now; None if none is free."""
        if not (idle := self._calls.idle(plan)):
            return None
        after = without(plan.pipelines[place.pipeline], {node}, [(place.rank, idle[0])])
        self._calls.call(idle[0], place, after)
        return idle[0]

    def _has_time(self, node: str, notice: Notice) -> bool:
        seconds = UNKNOWN_SECONDS if notice.seconds is None else notice.seconds
        since = self._since.setdefault(node, self._now())
        return self._now() - since < WAITING_SHARE * seconds
