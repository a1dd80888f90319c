"""When a pipeline is cut anew, and who is called for it."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from led_cluster import Writer

from megatron_bamboo.agent.calls import Calls
from megatron_bamboo.agent.healer import Healer
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.rearranger import STEPS_TO_COME_BACK, Rearranger
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.membership.assignment import called_key
from megatron_bamboo.membership.decision import StepDecision, StepReport
from megatron_bamboo.membership.store_server import AgentLink
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.arrangement import (
    Arrangement,
    PipelineShape,
    equal_pipelines,
    spans_of_layers,
)
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.growing import to_begin
from megatron_bamboo.planner.healing import Vacancy
from megatron_bamboo.planner.new_cut import NewCut
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.rearranging import rearrange

NODES = tuple(f"node{number}" for number in range(8))
SHAPE = JobShape(
    equal_pipelines(3, 1, 6, layers_per_chunk=2), "lazy", 9, 6, policy="auto", lease_seconds=60.0
)
PAIR = replace(SHAPE, arrangement=equal_pipelines(2, 1, 6, layers_per_chunk=3))
DECISION = StepDecision(3, False, (), "as the test wants it")


class Job:
    """What a coordinator knows of a job whose nodes have all joined."""

    def __init__(self, folder: Path, shape: JobShape, standbys: Sequence[str] = ()) -> None:
        self.folder = folder
        self.shape = shape
        self.table = Table()
        self.nodes = NODES[: shape.arrangement.num_nodes]
        self.plan = initial_plan(self.nodes, shape.arrangement, shape.redundancy)
        events = EventLog(folder, "coordinator")
        self.members = members = Members(self.nodes, self.table, events, standbys=standbys)
        for node in (*self.nodes, *standbys):
            self.join(node)
        reporter = Reporter(self.table, shape)
        self.calls = calls = Calls(members, self.table)
        self.healer = Healer(members, calls, shape.balance())
        self.rearranger = Rearranger(shape, members, calls, events, reporter, lambda: 0.0)

    def join(self, node: str) -> None:
        self.members.joined(AgentLink(node, 100, Writer()))  # type: ignore[arg-type]

    def passed(self, seconds: float, step: int = 2) -> None:
        report = StepReport(step, 0, (1.0).hex(), 0.1, None, 6 * step, seconds, ())
        self.rearranger.note(report)

    def settle(self, seconds: float) -> None:
        """So many steps pass that whoever is to come back has."""
        for step in range(2, 2 + STEPS_TO_COME_BACK):
            self.passed(seconds, step)

    def without(self, *lost: str) -> Plan:
        return go_on_after(self.plan, set(lost), DECISION, range(1, 101), self.shape.balance())

    def weighed(self) -> list[bool]:
        return [e["pays"] for e in read_events(self.folder) if e["event"] == "new_cut"]


def test_a_pipeline_that_has_lost_a_node_is_cut_anew_once_it_is_known_how_long_steps_take(
    tmp_path: Path,
) -> None:
    job = Job(tmp_path, SHAPE)
    hit = job.without("node1")
    assert job.rearranger.due(hit) is None
    job.passed(2.0)
    assert job.rearranger.due(hit) == NewCut.of(hit, 0)
    assert job.rearranger.due(job.plan) is None
    assert job.weighed() == [True]


def test_it_is_not_where_the_next_event_would_come_before_it_is_made(tmp_path: Path) -> None:
    job = Job(tmp_path, SHAPE)
    job.passed(700.0)
    assert job.rearranger.due(job.without("node1")) is None
    assert job.weighed() == [False]


def test_the_fastest_step_of_an_epoch_says_how_long_one_takes(tmp_path: Path) -> None:
    job = Job(tmp_path, SHAPE)
    job.passed(700.0)
    job.passed(2.0, step=3)
    job.passed(700.0, step=4)
    hit = job.without("node1")
    assert job.rearranger.due(hit) == NewCut.of(hit, 0)


def test_a_standby_is_called_and_joins_when_it_is_ready(tmp_path: Path) -> None:
    job = Job(tmp_path, PAIR, ["node9"])
    job.passed(2.0)
    assert job.rearranger.due(job.plan) is None
    assert job.rearranger.waits
    assert job.table.get(called_key("node9")) is not None
    assert job.rearranger.due(job.plan) is None and job.rearranger.waits
    job.table.set("ready/node9", b"1")
    cut = job.rearranger.due(job.plan)
    assert cut == NewCut.of(job.plan, 0, ("node9",)) and not job.rearranger.waits
    rearranging = PAIR.rearranging()
    assert rearranging is not None
    plan = rearrange(job.plan, DECISION, 9, cut, rearranging)
    assert job.rearranger.due(plan) is None
    assert plan.made().pipelines[0].shape.num_stages == 3


def test_a_standby_that_was_called_to_join_takes_a_vacancy_of_its_pipeline(tmp_path: Path) -> None:
    job = Job(tmp_path, PAIR, ["node9"])
    job.passed(2.0)
    assert job.rearranger.due(job.plan) is None and job.rearranger.waits
    assert job.healer.standby_for(job.without("node1")) == (Vacancy(0, 1), "node9")


def test_two_standbys_are_called_for_a_dissolved_pipeline_of_three(tmp_path: Path) -> None:
    shape = replace(SHAPE, arrangement=equal_pipelines(3, 2, 6, layers_per_chunk=2))
    job = Job(tmp_path, shape, ["new0", "new1"])
    job.passed(2.0)
    gone = job.without("node3", "node4", "node5")
    assert gone.arrangement.microbatches == (12, 0)
    assert job.rearranger.due(gone) is None and job.rearranger.waits
    for node in ("new0", "new1"):
        assert job.table.get(called_key(node)) is not None
        assert job.rearranger.due(gone) is None
        job.table.set(f"ready/{node}", b"1")
    assert job.rearranger.due(gone) == NewCut.of(gone, 1, ("new0", "new1"))


def test_one_whose_crew_is_whole_begins_as_it_was(tmp_path: Path) -> None:
    shape = replace(SHAPE, arrangement=equal_pipelines(2, 2, 12, layers_per_chunk=3))
    job = Job(tmp_path, shape, standbys=("node6", "node7"))
    plan = job.without("node2", "node3")
    job.passed(1.0)
    for rank, node in enumerate(("node6", "node7")):
        job.calls.call(node, Vacancy(1, rank), to_begin(plan, 1))
        job.table.set(f"ready/{node}", b"")
    job.settle(1.0)
    assert job.rearranger.due(plan) is None
    assert (job.rearranger.waits, job.weighed()) == (False, [])


def test_none_is_split_off_while_a_crew_is_there_for_it(tmp_path: Path) -> None:
    shape = replace(SHAPE, arrangement=equal_pipelines(4, 2, 8, layers_per_chunk=2))
    crew = tuple(f"new{rank}" for rank in range(4))
    job = Job(tmp_path, shape, standbys=crew)
    plan = job.without("node4", "node5", "node6", "node7")
    job.settle(1.0)
    for rank, node in enumerate(crew):
        job.calls.call(node, Vacancy(1, rank), to_begin(plan, 1))
        job.table.set(f"ready/{node}", b"")
    assert (job.rearranger.due(plan), job.weighed()) == (None, [])
    alone = Job(tmp_path / "alone", shape)
    alone.settle(1.0)
    split = alone.rearranger.due(plan)
    assert split is not None and [len(nodes) for _, nodes in split.crews] == [2, 2]


def test_who_is_left_of_two_that_were_called_begins_with_another_one(tmp_path: Path) -> None:
    shape = replace(SHAPE, arrangement=equal_pipelines(3, 2, 6, layers_per_chunk=2))
    job = Job(tmp_path, shape, ["new0", "new1"])
    job.passed(2.0)
    gone = job.without("node3", "node4", "node5")
    assert job.rearranger.due(gone) is None
    job.table.set("ready/new1", b"1")
    job.members.fence("new0", "the test wants it")
    assert job.rearranger.due(gone) is None and not job.rearranger.waits
    job.join("new0.2")
    assert job.rearranger.due(gone) is None and job.rearranger.waits
    job.table.set("ready/new0.2", b"1")
    cut = job.rearranger.due(gone)
    assert cut is not None and set(cut.crews[0][1]) == {"new1", "new0.2"}


def uneven(folder: Path, standbys: Sequence[str] = ()) -> Job:
    """Four nodes and two; only over three and three can the layers be shared out evenly."""
    shapes = (
        PipelineShape(spans_of_layers((2, 2, 1, 1)), 5),
        PipelineShape(spans_of_layers((3, 3)), 3),
    )
    return Job(folder, replace(SHAPE, arrangement=Arrangement(shapes)), standbys)


def test_a_node_is_lent_where_no_standby_is_there(tmp_path: Path) -> None:
    job = uneven(tmp_path)
    job.passed(2.0)
    assert job.rearranger.due(job.plan) is None
    job.settle(2.0)
    crews = (0, ("node0", "node1", "node2")), (1, ("node4", "node5", "node3"))
    assert job.rearranger.due(job.plan) == NewCut(crews)
    assert job.weighed() == [True]


def test_none_is_lent_while_a_standby_may_be_called(tmp_path: Path) -> None:
    job = uneven(tmp_path, ["node9"])
    job.settle(2.0)
    assert job.rearranger.due(job.plan) is None and job.rearranger.waits
    job.table.set("ready/node9", b"1")
    assert job.rearranger.due(job.plan) == NewCut.of(job.plan, 1, ("node9",))


@pytest.mark.parametrize("seconds", [2.0, 100.0])
def test_what_only_protects_pays_where_few_iterations_are_expected(
    tmp_path: Path, seconds: float
) -> None:
    """Two pipelines of two, of which one node is left in the second: in one of three stages an
    iteration takes longer, but the loss of that node would let all begin the step anew."""
    shape = replace(SHAPE, arrangement=equal_pipelines(2, 2, 12, layers_per_chunk=3))
    job = Job(tmp_path, shape)
    job.settle(seconds)
    hit = job.without("node3")
    merged = NewCut(((0, ("node0", "node1", "node2")), (1, ())))
    assert job.rearranger.due(hit) == (merged if seconds == 100.0 else None)


@pytest.mark.parametrize(
    ("stages", "given", "least"), [(3, None, 2), (8, None, 4), (9, None, 5), (8, 7, 7), (8, 2, 2)]
)
def test_with_half_of_its_nodes_a_pipelines_stages_are_known_to_fit(
    stages: int, given: int | None, least: int
) -> None:
    arrangement = equal_pipelines(stages, 2, 6, layers_per_chunk=2)
    rearranging = replace(SHAPE, arrangement=arrangement, least_nodes=given).rearranging()
    assert rearranging is not None
    assert (rearranging.least_nodes, rearranging.is_needed) == (least, given is not None)


def test_what_a_pipelines_stages_need_is_not_weighed(tmp_path: Path) -> None:
    shape = replace(SHAPE, arrangement=equal_pipelines(3, 2, 6, layers_per_chunk=2), least_nodes=3)
    job = Job(tmp_path, shape)
    job.settle(2.0)
    merged = NewCut(((0, ("node0", "node1", "node2", "node3", "node5")), (1, ())))
    assert job.rearranger.due(job.without("node4")) == merged
    job = Job(tmp_path / "two", replace(shape, least_nodes=None))
    job.passed(2.0)
    hit = job.without("node4")
    assert job.rearranger.due(hit) == NewCut.of(hit, 1)


def test_a_standby_that_would_gain_nothing_is_not_called(tmp_path: Path) -> None:
    job = Job(tmp_path, SHAPE, ["node9"])
    job.passed(2.0)
    assert job.rearranger.due(job.plan) is None
    assert job.table.get(called_key("node9")) is None and not job.rearranger.waits


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            {"arrangement": equal_pipelines(3, 2, 6, num_chunks=2)},
            "the stages of several pipelines have several chunks",
        ),
        ({"verifies": True}, "copies of the state are compared"),
        ({"policy": "bamboo"}, None),
    ],
)
def test_where_it_cannot_be_a_line_says_so(
    tmp_path: Path, change: dict[str, object], why: str | None
) -> None:
    job = Job(tmp_path, replace(SHAPE, **change))
    job.passed(2.0)
    lost = go_on_after(job.plan, {"node1"}, DECISION, range(1, 101), None)
    assert job.rearranger.due(lost) is None
    said = [key for key in job.table.items("") if "cuts-stay" in key]
    assert bool(said) == (why is not None)
    assert job.shape.rearranging() is None
    assert why in (None, job.shape.why_cuts_stay())
