"""Which standby takes a vacancy: one that was called for it, a free one, or one called in vain."""

from pathlib import Path

import pytest
from led_cluster import Writer

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.healer import Healer
from megatron_bamboo.agent.members import Members
from megatron_bamboo.membership.leaving import Notice
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import Vacancy, with_standby
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss

NODES = tuple(f"node{number}" for number in range(8))
WHOLE = initial_plan(NODES, equal_pipelines(4, 2, 4), "lazy")
PLACE = Vacancy(0, 1)


class Job:
    """Eight nodes, and standbys of which the first was called for the place of node1."""

    def __init__(self, folder: Path, *standbys: str) -> None:
        self.table = Table()
        members = Members(NODES, self.table, EventLog(folder, "coordinator"), standbys=standbys)
        for node in (*NODES, *standbys):
            members.joined(AgentLink(node, 1, Writer()))  # type: ignore[arg-type]
        calls = Calls(members, self.table)
        calls.call(standbys[0], PLACE, with_standby(WHOLE.pipelines[0], 1, standbys[0]))
        self.healer = Healer(members, calls, None)

    def without(self, node: str) -> Plan:
        return plan_after_loss(WHOLE, {node}, None)


@pytest.mark.parametrize(
    ("victim", "standbys", "taken"),
    [
        ("node1", ("a", "b"), (PLACE, "a")),
        ("node3", ("a", "b"), (Vacancy(0, 3), "b")),
        ("node3", ("a",), (Vacancy(0, 3), "a")),
        ("node6", ("a",), None),
    ],
    ids=["called for it", "free", "called in vain", "called in another pipeline"],
)
def test_who_takes_a_vacancy(
    tmp_path: Path, victim: str, standbys: tuple[str, ...], taken: tuple[Vacancy, str] | None
) -> None:
    job = Job(tmp_path, *standbys)
    assert job.healer.standby_for(job.without(victim)) == taken


def test_who_is_to_replace_a_node_is_kept_for_it(tmp_path: Path) -> None:
    job = Job(tmp_path, "a")
    job.table.set("noticed/node1", Notice("taken").to_json().encode())
    assert job.healer.standby_for(job.without("node3")) is None
