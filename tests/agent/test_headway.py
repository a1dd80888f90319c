"""How far a job is, by what its workers tell: evaluations among it."""

from dataclasses import replace
from pathlib import Path

import pytest

from megatron_bamboo.agent.headway import Headway
from megatron_bamboo.agent.job import Injection, JobShape, check_reachable
from megatron_bamboo.agent.members import Members
from megatron_bamboo.agent.report import Reporter
from megatron_bamboo.errors import UserError
from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.restores import Restores
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.arrangement import equal_pipelines

SHAPE = JobShape(equal_pipelines(2, 1, 2), "lazy", 9, 2, start_step=2, eval_interval=2)


def headway(table: Table, folder: Path) -> Headway:
    events = EventLog(folder, "coordinator")
    members = Members(["node0", "node1"], table, events, 1)
    return Headway(SHAPE, table, members, events, Reporter(table, SHAPE))


def passed(table: Table, step: int) -> None:
    report = StepReport(step, 0, (1.0).hex(), 0.1, None, 2 * step, 0.1, ())
    table.set(f"passed/{step}", report.to_json().encode())


def evaluated(table: Table, step: int) -> None:
    outcome = Evaluated(step, Kind.INTERVAL, 0, 0.5, {"lm loss": (2.0).hex()})
    table.set(f"evaluated/{step}/interval", outcome.to_json().encode())


def test_an_evaluation_is_under_way_until_its_outcome_is_there(tmp_path: Path) -> None:
    table = Table()
    seen = headway(table, tmp_path)
    found = [seen.is_evaluating]  # that of step 2 was before the checkpoint
    for step in (3, 4):
        passed(table, step)
        list(seen.look())
        found.append(seen.is_evaluating)
    evaluated(table, 4)
    list(seen.look())
    # Another coordinator finds the same, and says nothing twice.
    second = headway(table, tmp_path)
    list(second.look())
    assert [*found, seen.is_evaluating, second.is_evaluating] == [False, False, True, False, False]
    (event,) = (e for e in read_events(tmp_path) if e["event"] == "evaluation")
    assert (event["step"], event["kind"], event["seconds"]) == (4, "interval", 0.5)


def test_evaluations_since_a_checkpoint_are_undone_with_their_steps(tmp_path: Path) -> None:
    table = Table()
    seen = headway(table, tmp_path)
    for step in (3, 4):
        passed(table, step)
    evaluated(table, 4)
    table.set("evaluation/4/interval/batches/0/2/0/0", b"{}")
    list(seen.look())
    restores = Restores(1, 1, 3, 4)
    restores.write(table)
    seen.go_back(restores)
    evaluated(table, 4)  # a worker says so late
    assert table.items("evaluat") == {}
    passed(table, 4)  # by a plan of before, too
    list(seen.look())
    assert (seen.step, seen.is_evaluating) == (3, False)


def test_what_is_evaluated_is_headway(tmp_path: Path) -> None:
    table = Table()
    seen = headway(table, tmp_path)
    seen.moved_at = 0.0
    table.set("evaluation/4/interval/batches/2/0/0", b"{}")
    assert seen.moved_at > 0.0


def test_a_fault_in_an_evaluation_needs_one_after_its_step() -> None:
    for text in ("node0@iter4:EVAL1/0.0F1", "node0@iter9:EVAL2/1.0RECV_F0"):
        check_reachable(Injection.parse(text), SHAPE)
    for text, reason in (
        ("node0@iter5:EVAL1/0.0F1", "there is no evaluation after that iteration"),
        ("node0@iter2:EVAL1/0.0F1", "this job has 3 to 9"),
        ("node0@iter4:EVAL1/2.0F1", "there is no stage 2"),
    ):
        with pytest.raises(UserError, match=reason):
            check_reachable(Injection.parse(text), SHAPE)
    with pytest.raises(UserError, match="there is no evaluation"):
        alone = replace(SHAPE, eval_interval=None)
        check_reachable(Injection.parse("node0@iter4:EVAL1/0.0F1"), alone)
