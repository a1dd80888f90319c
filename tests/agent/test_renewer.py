"""When a job with checkpoints alone begins again with nodes that have come."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.headway import Headway
from megatron_bamboo.agent.job import JobShape, JobSpec
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.renewer import Renewer
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.agent.restorer import Restorer
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan

NODES = ("node0", "node1", "node2", "node3")
SPARE = ("node4", "node5")


class Line:
    """Stands in for an agent's connection."""

    def is_closing(self) -> bool:
        return False

    def write(self, _frame: bytes) -> None:
        pass


class Job:
    """Two pipelines of which one is dissolved; a clock that the test sets."""

    def __init__(self, folder: Path, policy: str, standbys: Sequence[str]) -> None:
        shape = JobShape(
            equal_pipelines(2, 2, 4), "none", 1000, 8, policy=policy, restores=True, saves=True
        )
        self.folder, self.now = folder, 0.0
        table, events = Table(), EventLog(folder, "coordinator")
        members = Members(NODES, table, events, standbys=standbys)
        for node in (*NODES, *standbys):
            members.joined(AgentLink(node, 100, Line()))  # type: ignore[arg-type]
        reporter, calls = Reporter(table, shape), Calls(members, table)
        self.headway = Headway(shape, table, members, events, reporter)
        spec = JobSpec(NODES, shape, folder)
        restorer = Restorer(spec, members, calls, table, events, reporter, self.headway)
        whole = initial_plan(NODES, shape.arrangement, "none")
        members.lost["node2"] = members.lost["node3"] = "the test says so"
        self.plan: Plan = restorer.plan(whole, NODES[:2], {"node2", "node3"})
        self.renewer = Renewer(shape, members, restorer, self.headway, events, lambda: self.now)
        self.renewer.published(self.plan)

    def passes(self, step: int, now: float, seconds: float) -> None:
        self.now, self.headway.step = now, step
        report = StepReport(step, self.plan.epoch, (1.0).hex(), 0.1, None, 8 * step, seconds, ())
        self.renewer.passed(report, self.plan)


def test_it_pays_while_little_is_to_be_done_again(tmp_path: Path) -> None:
    job = Job(tmp_path, "checkpoint", SPARE)
    assert job.renewer.due(job.plan) == ()  # nothing is known of steps yet
    job.passes(1, now=21.0, seconds=1.0)  # so a return takes 20 s
    assert job.renewer.due(job.plan) == (*NODES[:2], *SPARE)
    # Steps of little more than half the time, but 600 more, and the next event may come soon.
    job.passes(600, now=620.0, seconds=1.0)
    assert job.renewer.due(job.plan) == ()
    first, second = (e for e in read_events(tmp_path) if e["event"] == "renewal")
    assert (first["pays"], first["before"], first["pause"]) == (True, 1.0, 21.0)
    assert first["after"] == pytest.approx(5 / 9)
    assert (second["pays"], second["pause"]) == (False, 620)


def test_without_newcomers_or_under_another_policy_all_stays(tmp_path: Path) -> None:
    for policy, standbys in (("checkpoint", ()), ("checkpoint", SPARE[:1]), ("oobleck", SPARE)):
        job = Job(tmp_path / f"{policy}{len(standbys)}", policy, standbys)
        job.passes(1, now=2.0, seconds=1.0)
        assert job.renewer.due(job.plan) == ()
