"""Which standbys become a pipeline that has no node left, and for how long all others wait."""

import asyncio
import time
from pathlib import Path

import pytest
from led_cluster import Writer

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.repairer import Repairer
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.plan import initial_plan

NODES, STANDBYS = ("node0", "node1", "node2", "node3"), ("node4", "node5", "node6")
PLAN = initial_plan(NODES, equal_pipelines(2, 2, 4), "lazy")
OPEN = StepDecision(3, False, None, "as the test wants it")
LOST = frozenset({"node0", "node1"})


class Waiting:
    """Standbys that have joined, and a coordinator that waits for news of them."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.table = Table()
        events = EventLog(folder, "coordinator")
        self.members = Members(NODES, self.table, events, standbys=STANDBYS)
        self.calls = Calls(self.members, self.table)
        self.repairer = Repairer(self.members, self.calls, seconds, self._hear)
        self.turns = 0
        self.links: dict[str, AgentLink] = {}

    def join(self, *nodes: str) -> None:
        for node in nodes:
            self.links[node] = AgentLink(node, 100, Writer())  # type: ignore[arg-type]
            self.members.joined(self.links[node])

    def crews(self) -> dict[int, tuple[str, ...]]:
        return asyncio.run(self.repairer.crews(PLAN, LOST, OPEN))

    async def _hear(self, until: float) -> bool:
        """With each turn one more is ready; the first dies before it is."""
        self.turns += 1
        if self.turns == 1 and "node4" in self.links:
            self.members.closed(self.links["node4"])
        for node in list(self.calls.called(PLAN))[: self.turns - 1]:
            self.table.set(f"ready/{node}", b"1")
        return time.monotonic() < until


@pytest.fixture
def waiting(tmp_path: Path) -> Waiting:
    return Waiting(tmp_path, 60)


def test_all_wait_until_as_many_as_there_are_stages_are_ready(waiting: Waiting) -> None:
    """Another one takes the place of a standby that is lost meanwhile."""
    waiting.join(*STANDBYS)
    assert waiting.crews() == {0: ("node6", "node5")}
    places = waiting.calls.called(PLAN)
    assert places == {"node5": Vacancy(0, 1), "node6": Vacancy(0, 0)}


def test_too_few_are_nobody(waiting: Waiting) -> None:
    waiting.join("node5")
    assert waiting.crews() == {}
    assert waiting.calls.called(PLAN) == {}


def test_who_is_not_ready_in_time_is_not_waited_for(tmp_path: Path) -> None:
    waiting = Waiting(tmp_path, 0)
    waiting.join("node5", "node6")
    assert waiting.crews() == {}


def test_where_each_pipeline_has_a_node_nobody_is_called(waiting: Waiting) -> None:
    waiting.join(*STANDBYS)
    crews = waiting.repairer.crews(PLAN, frozenset({"node0"}), OPEN)
    assert asyncio.run(crews) == {}
    assert waiting.calls.called(PLAN) == {}
