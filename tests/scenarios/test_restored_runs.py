"""Where some state has no live holder all begin again from the last checkpoint, in their processes.

Each pipeline keeps its microbatches, on fewer nodes too: so the run has the bits of one without a
loss, and with it those of one that is started by hand from that checkpoint.
"""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from forked_jobs import FinishedJob
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.membership.workers import node_of
from megatron_bamboo.observe.compare import compare_runs, format_comparison
from megatron_bamboo.rehearsal.record import Events, said_steps
from megatron_bamboo.rehearsal.work import work_complaints

pytestmark = pytest.mark.multiprocess

TWO = Shape(2, 2, num_steps=6)
BOTH_HOLDERS = ("node1@iter4:1.0B1", "node0@iter4:0.0B2")
RESTORE = ("--bamboo-on-no-holder", "restore")


def complaints(
    scenarios: ScenarioRunner, job: FinishedJob, shape: Shape, lost: Sequence[str]
) -> list[str]:
    """What is not as it must be of a run that has gone back once."""
    if job.result.status != 0:
        return [f"status {job.result.status}: {job.result.message}", *job.result.lines]
    found = work_complaints(Events.read(job.job_dir), JobShape.read(job.job_dir))
    if (nodes := [node for node, _ in job.result.lost]) != list(lost):
        found.append(f"lost are {nodes}")
    if job.result.left_behind:
        found.append(f"left behind: {job.result.left_behind}")
    comparison = compare_runs(scenarios.undisturbed(shape), job.job_dir)
    return found if comparison.equal else [*found, format_comparison(comparison)]


def went_back(job: FinishedJob) -> dict[str, set[int]]:
    """By node that went back as the very process that it was: its processes."""
    notes = job.identities()
    return {
        node_of(event["source"]): {n["pid"] for n in notes if n["source"] == event["source"]}
        for event in job.events("went_back")
    }


def test_fewer_nodes_go_on_from_the_last_save(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    flags = ("--save", str(tmp_path / "save"), "--save-interval", "2")
    job = scenarios.run(TWO, "lazy", *BOTH_HOLDERS, more_flags=flags)
    assert complaints(scenarios, job, TWO, ["node1", "node0"]) == []
    assert said_steps(job.result.lines) == [1, 2, 3, 3, 4, 5, 6]
    assert [len(processes) for processes in went_back(job).values()] == [1, 1]
    (event,) = job.events("restored")
    assert (event["step"], event["undone_steps"], event["undone_samples"]) == (2, 1, 8)
    said = "\n".join(job.result.lines)
    assert ": 1 iteration with 8 samples are undone, to be done again" in said


def test_standbys_begin_again_too_with_shared_state_and_lose_again(
    scenarios: ScenarioRunner,
) -> None:
    """Nothing was saved: all begin with what the seed gives."""
    shape = Shape(2, 2, num_steps=6, variant="zero-bf16")
    faults = (*BOTH_HOLDERS, "node3@iter5:1REDUCE")
    job = scenarios.run(shape, "eager", *faults, more_flags=RESTORE, num_standbys=2)
    assert complaints(scenarios, job, shape, ["node1", "node0", "node3"]) == []
    assert said_steps(job.result.lines) == [1, 2, 3, 1, 2, 3, 4, 5, 6]
    assert sorted(went_back(job)) == ["node2", "node3"]
    (end,) = job.events("finished_job")
    assert end["pipelines"][0]["stages"] == ["node4", "node5"]


def test_newcomers_are_taken_in_by_a_return_that_pays(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    shape = Shape(2, 2, num_steps=40)
    flags = ("--save", str(tmp_path / "save"), "--save-interval", "10")
    flags += ("--bamboo-policy", "checkpoint")
    fault = "node3@iter3:1.0B1"
    job = scenarios.run(shape, "none", fault, more_flags=flags, respawn_seconds=0.3)
    assert job.result.status == 0, job.result.message
    loss, *others = (event["why"] for event in job.events("restored"))
    assert "stage 1 has no live holder" in loss
    assert [why.endswith("can take a place") for why in others] == [True]
    (weighed,) = (event for event in job.events("renewal") if event["pays"])
    assert weighed["changed"] > weighed["unchanged"] > 0
    (end,) = job.events("finished_job")
    assert [pipe["shape"]["num_microbatches"] for pipe in end["pipelines"]] == [4, 4]
    assert compare_runs(scenarios.undisturbed(shape), job.job_dir).max_loss_difference < 1e-5


def test_one_node_of_two_workers_goes_on_alone(scenarios: ScenarioRunner, tmp_path: Path) -> None:
    shape = Shape(2, 1, num_steps=4, tensor_size=2)
    flags = ("--save", str(tmp_path / "save"), "--save-interval", "1")
    flags += ("--bamboo-policy", "checkpoint")
    job = scenarios.run(shape, "none", "node1@iter3:1.0B1", more_flags=flags)
    assert complaints(scenarios, job, shape, ["node1"]) == []
    assert said_steps(job.result.lines) == [1, 2, 3, 4]
    assert sorted(went_back(job)) == ["node0"]


def test_who_comes_after_all_went_back_shares_the_state_as_the_others_do(
    scenarios: ScenarioRunner, tmp_path: Path
) -> None:
    """One pipeline was left of two, which has all of the optimizer's state."""
    shape = Shape(2, 2, num_steps=10_000, variant="zero-bf16")
    flags = ("--save", str(tmp_path / "save"), *RESTORE, "--bamboo-verify-replicas", "1")
    job = scenarios.start(shape, "lazy", more_flags=flags, respawn_seconds=2.0)
    job.wait_for_step("node3", 2)
    agents = job.agents()
    for node in ("node0", "node1", "node2"):
        os.killpg(agents[node], signal.SIGKILL)
    healed = job.wait_for_event("changed")["pipelines"]
    assert len(set(healed[0]["stages"])) == 2 and healed[1]["stages"] == []
    assert bamboo(["stop", "--save", str(job.request.job_dir)]) == 0
    ended = job.finish()
    assert ended.result.status == Status.STOPPED, ended.result.message
    assert sorted(node for node, _ in ended.result.lost) == ["node0", "node1", "node2"]
    assert ended.events("difference") == []
