"""The commit decision over every mixture of what workers may have seen."""

import itertools
import json
from dataclasses import asdict

import pytest

from megatron_bamboo.membership.decision import (
    Fenced,
    Record,
    StepDecision,
    StepReport,
    decide_step,
    parse_record,
)

VECTOR = ((1.5).hex(), (0.1).hex())
COMPUTING, WAITING, PASSED, FENCED = "computing", "waiting", "passed", "fenced"


def record(node: str, state: str) -> Record | Fenced:
    """A worker about step 7, whose step 6 all have passed."""
    match state:
        case "computing":
            return Record(node, 6, True, True, ((0.0).hex(),))
        case "waiting":
            return Record(node, 7, True, False)
        case "passed":
            return Record(node, 7, True, True, VECTOR)
        case _:
            return Fenced(node)


def report(step: int) -> StepReport:
    return StepReport(step, 0, (3.25).hex(), 1e-3, (1.0).hex(), 16 * step, 0.3, VECTOR)


def possible(states: tuple[str, ...], confirmed: bool) -> bool:
    """A commit is passed only when all have entered it, and somebody must be left to speak."""
    passed = confirmed or PASSED in states
    return set(states) != {FENCED} and not (passed and COMPUTING in states)


GRID = [
    (states, confirmed)
    for states in itertools.product([COMPUTING, WAITING, PASSED, FENCED], repeat=3)
    for confirmed in (False, True)
    if possible(states, confirmed)
]


@pytest.mark.parametrize(("states", "confirmed"), GRID)
def test_one_passed_means_that_all_finish(states: tuple[str, ...], confirmed: bool) -> None:
    records = {f"node{i}": record(f"node{i}", state) for i, state in enumerate(states)}
    decision = decide_step(records, {7: report(7)} if confirmed else {})
    if PASSED in states or confirmed:
        assert (decision.step, decision.applied, decision.vector) == (7, True, VECTOR)
    elif WAITING in states:
        assert (decision.step, decision.applied, decision.vector) == (7, False, None)
    else:
        assert (decision.step, decision.applied) == (6, True)


def test_the_reason_names_who_knows() -> None:
    records = {"node0": record("node0", WAITING), "node2": record("node2", PASSED)}
    assert decide_step(records, {}).reason == "node2 passed its commit"
    assert decide_step({"node0": records["node0"]}, {}).reason == (
        "node0 entered its commit, nobody passed it"
    )


def test_before_the_first_commit_nothing_was_applied() -> None:
    records = {f"node{i}": Record(f"node{i}", 1, False, False) for i in range(3)}
    decision = decide_step(records, {})
    assert decision == StepDecision(1, False, None, "nobody entered its commit")


def test_a_worker_left_behind_in_an_older_commit_is_served_first() -> None:
    records = {
        "node0": Record("node0", 6, True, False),
        "node1": Record("node1", 6, True, True, VECTOR),
    }
    assert decide_step(records, {5: report(5)}).vector == VECTOR


def test_without_any_record_there_is_no_answer() -> None:
    with pytest.raises(ValueError, match="no worker left a record"):
        decide_step({"node0": Fenced("node0")}, {})


def test_records_and_reports_come_back_exactly() -> None:
    for state in (COMPUTING, WAITING, PASSED):
        written = record("node1", state)
        assert isinstance(written, Record)
        assert parse_record("node1", written.to_json().encode()) == written
    assert parse_record("node1", b"fenced") == Fenced("node1")
    assert StepReport.from_json(report(4).to_json()) == report(4)


def test_a_record_that_contradicts_itself_is_refused() -> None:
    with pytest.raises(ValueError, match="entered"):
        Record("node0", 1, False, True, VECTOR)
    with pytest.raises(ValueError, match="hands over"):
        Record("node0", 1, True, True)
    with pytest.raises(ValueError, match="needs exactly"):
        Record.from_json('{"node": "node0", "step": 1}')


def test_who_is_behind_with_its_parameters_decides_what_is_gathered_again() -> None:
    records: dict[str, Record | Fenced] = {
        "node0": Record("node0", 6, True, True, VECTOR, gathered=6),
        "node1": Record("node1", 6, True, True, VECTOR, gathered=5),
        "node2": Fenced("node2"),
    }
    decision = decide_step(records, {})
    assert (decision.step, decision.applied, decision.gathered) == (6, True, 5)
    assert decide_step({"node0": records["node0"]}, {}).gathered == 6
    assert StepDecision.from_fields(json.loads(json.dumps(asdict(decision)))) == decision
