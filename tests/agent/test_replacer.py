"""Standbys are called for the places of nodes that are to leave, and waited for in time."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from led_cluster import Writer

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.drainer import Drainer
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.replacer import UNKNOWN_SECONDS, Replacements, Replacer
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.membership.leaving import NOTICED, Notice
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.plan import initial_plan

NODES = tuple(f"node{number}" for number in range(4))
PLAN = initial_plan(NODES, equal_pipelines(4, 1, 4), "lazy")
PLACE = Vacancy(0, 1)
NOBODY = Replacements((), frozenset())


class Job:
    """Four nodes, and as many standbys as a test wants."""

    def __init__(self, folder: Path, num_standbys: int) -> None:
        self.table, self.seconds = Table(), 0.0
        self.standbys = [f"node{4 + number}" for number in range(num_standbys)]
        events = EventLog(folder / "events", "coordinator")
        self.members = Members(NODES, self.table, events, standbys=self.standbys)
        self.links = {
            node: AgentLink(node, 1, Writer())  # type: ignore[arg-type]
            for node in (*NODES, *self.standbys)
        }
        for link in self.links.values():
            self.members.joined(link)
        self.replacer = Replacer(
            self.members, Calls(self.members, self.table), lambda: self.seconds
        )

    def drainer(self) -> Drainer:
        shape = JobShape(equal_pipelines(4, 1, 4), "lazy", 10, 16)
        return Drainer(self.members, self.replacer, self.table, Reporter(self.table, shape))

    def look(self, seconds: float | None = 60.0) -> Replacements:
        return self.replacer.look(PLAN, {"node1": Notice("taken", seconds)})

    def called(self) -> set[str]:
        return {key.removeprefix("called/") for key in self.table.items("called/")}

    def get_ready(self, node: str) -> None:
        self.table.set(f"ready/{node}", b"1")


def test_a_standby_is_called_for_the_place_and_waited_for(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    assert job.look() == job.look() == Replacements((), frozenset({"node1"}))
    assert job.called() == {"node4"}
    called = json.loads(job.table.get("called/node4") or b"")
    # It will shadow the stage after its own, as the one before it does.
    assert (called["pipeline"], called["rank"], called["stages"]) == (0, 1, [1, 2])
    job.get_ready("node4")
    assert job.look() == Replacements(((PLACE, "node4"),), frozenset())


@pytest.mark.parametrize("seconds", [60.0, None], ids=["known", "unknown"])
def test_a_node_waits_half_of_its_time(tmp_path: Path, seconds: float | None) -> None:
    job = Job(tmp_path, 1)
    whole = UNKNOWN_SECONDS if seconds is None else seconds
    for job.seconds, waits in ((0.0, True), (0.4 * whole, True), (0.6 * whole, False)):
        assert job.look(seconds) == Replacements((), frozenset({"node1"} if waits else ()))
    job.get_ready("node4")
    assert job.look(seconds).ready == ((PLACE, "node4"),)


def test_a_standby_that_is_lost_is_followed_by_another_or_by_nobody(tmp_path: Path) -> None:
    job = Job(tmp_path, 2)
    for standby in job.standbys:
        assert job.look().waiting == {"node1"}
        job.members.closed(job.links[standby])
    assert job.called() == {"node4", "node5"}
    assert job.look() == NOBODY


def test_without_a_standby_nobody_waits(tmp_path: Path) -> None:
    assert Job(tmp_path, 0).look() == NOBODY


def test_a_standby_that_is_to_leave_itself_is_not_called(tmp_path: Path) -> None:
    job = Job(tmp_path, 1)
    job.table.set("noticed/node4", Notice("taken").to_json().encode())
    assert (job.look(), job.called()) == (NOBODY, set())


def test_each_notice_gives_a_node_its_time_anew(tmp_path: Path) -> None:
    """One that proved false an hour ago has taken nothing of it."""
    job = Job(tmp_path, 1)
    drainer = job.drainer()
    for job.seconds, is_over in ((0.0, False), (20.0, True), (3600.0, False)):
        word = Notice("taken", 60.0, is_over)
        job.table.set(f"{NOTICED}node1", word.to_json().encode())
        drainer.look(PLAN)
        assert drainer.due(PLAN) == ((), ())
    job.seconds += 31.0
    drainer.look(PLAN)
    assert drainer.due(PLAN) == (("node1",), ())


def test_a_machine_that_is_to_be_taken_is_so_also_when_its_pipeline_is_dissolved(
    tmp_path: Path,
) -> None:
    """Else it would come back as a standby, and be lost as one."""
    job = Job(tmp_path, 0)
    job.table.set(f"{NOTICED}node1", Notice("taken").to_json().encode())
    job.drainer().dismiss(0, replace(PLAN, dismissed=("node1", "node2")))
    assert (job.members.is_leaving("node1"), job.members.is_leaving("node2")) == (True, False)
    for node in ("node1", "node2"):
        job.members.dismiss(node)
    assert job.members.drained == {"node1": "taken", "node2": "its pipeline is dissolved"}


def test_a_node_that_has_handed_over_is_no_standby_though_its_notice_proves_false(
    tmp_path: Path,
) -> None:
    """A plan that named it would wait for a node that leaves."""
    job = Job(tmp_path, 1)
    job.table.set("noticed/node4", Notice("taken", is_over=True).to_json().encode())
    job.table.set("going/node4", b"3 7")
    assert (job.look(), job.called()) == (NOBODY, set())
