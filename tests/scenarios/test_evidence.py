"""The checks of a run see what they are there for: a good run's folder is spoiled in many ways."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from evidence import SECONDS_TO_HEAL, Expected, complaints, ended_too_soon
from forked_jobs import FinishedJob
from moments import FATAL_STEP
from safetensors.torch import load_file, safe_open, save_file
from scenario_runner import ScenarioRunner
from tiny_gpt import Shape

pytestmark = pytest.mark.multiprocess

SHAPE = Shape(3, 2)
VICTIM, SHADOW, BYSTANDER = "node4", "node3", "node1"
EXPECTED = Expected(SHAPE, "eager", [VICTIM])
# With two chunks the gaps hold 17 of the 24 redundant forwards.
SHARED = Shape(3, 1, num_steps=4, num_chunks=2, tensor_size=2)
SHARED_EXPECTED = Expected(SHARED, "bubble", ["node1"])
Event = dict[str, Any]


@pytest.fixture(scope="module")
def good(scenarios: ScenarioRunner) -> FinishedJob:
    return scenarios.run(SHAPE, "eager", f"{VICTIM}@iter{FATAL_STEP}:1.0B1")


@pytest.fixture(scope="module")
def good_shared(scenarios: ScenarioRunner) -> FinishedJob:
    return scenarios.run(SHARED, "bubble", f"node1@iter{FATAL_STEP}:1.1B1")


@pytest.fixture
def job(good: FinishedJob, tmp_path: Path) -> FinishedJob:
    return copy_to_spoil(good, tmp_path)


def copy_to_spoil(good: FinishedJob, tmp_path: Path) -> FinishedJob:
    folder = tmp_path / "job"
    shutil.copytree(good.request.folder, folder)
    return replace(good, request=replace(good.request, folder=str(folder)))


def test_a_good_run_has_no_complaints(scenarios: ScenarioRunner, good: FinishedJob) -> None:
    assert complaints(good, EXPECTED, scenarios.undisturbed(SHAPE)) == []


def test_a_good_run_of_chunks_and_shared_layers_has_no_complaints(
    scenarios: ScenarioRunner, good_shared: FinishedJob
) -> None:
    assert complaints(good_shared, SHARED_EXPECTED, scenarios.undisturbed(SHARED)) == []


def change_events(log: Path, change: Callable[[list[Event]], list[Event]]) -> None:
    events = [json.loads(line) for line in log.read_text().splitlines()]
    log.write_text("".join(json.dumps(event) + "\n" for event in change(events)))


def is_action(event: Event, step: int, *names: str) -> bool:
    return event["event"] == "action" and event["step"] == step and event["action"] in names


def twice(step: int, *names: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: events + [e for e in events if is_action(e, step, *names)]


def without(step: int, *names: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [e for e in events if not is_action(e, step, *names)]


def added(step: int, like: str, name: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: (
        events + [e | {"action": name} for e in events if is_action(e, step, like)]
    )


def renamed(step: int, before: str, after: str) -> Callable[[list[Event]], list[Event]]:
    return lambda events: [
        e | {"action": after} if is_action(e, step, before) else e for e in events
    ]


@pytest.mark.parametrize(
    ("node", "change", "complaint"),
    [
        (BYSTANDER, twice(FATAL_STEP, "1.0F2"), "pipeline 0, step 2: node1 ran 1.0F2 2 times"),
        (BYSTANDER, without(5, "1.0B0"), "pipeline 0, step 5: stage 1, chunk 0, microbatch 0"),
        (SHADOW, twice(FATAL_STEP, "0.0B3"), "pipeline 1, step 2: node3 ran 0.0B3 2 times"),
        (SHADOW, without(FATAL_STEP, "1.0B1"), "pipeline 1, step 2: stage 1, chunk 0"),
        (SHADOW, added(FATAL_STEP, "1.0RF0", "1.0F0"), "F by ['node3'], RF by ['node3']"),
        (SHADOW, without(1, "1.0RF0"), "pipeline 1, step 1: stage 1, chunk 0, microbatch 0"),
        (SHADOW, renamed(4, "1.0F0", "1.0RF0"), "pipeline 1, step 4: stage 1, chunk 0"),
    ],
)  # fmt: skip
def test_work_done_twice_or_not_at_all_is_seen(
    scenarios: ScenarioRunner,
    job: FinishedJob,
    node: str,
    change: Callable[[list[Event]], list[Event]],
    complaint: str,
) -> None:
    change_events(job.job_dir / "events" / f"{node}.jsonl", change)
    found = complaints(job, EXPECTED, scenarios.undisturbed(SHAPE))
    assert any(complaint in text for text in found), found


@pytest.mark.parametrize(
    ("worker", "change", "complaint"),
    [
        # Of stage 1 the gaps hold 1.0RF0 to 1.1RF1, of stage 0 all but 0.1RF2 and 0.1RF3.
        ("node0:0", without(1, "1.1RF1"), "step 1, tensor rank 0: stage 1, chunk 1, microbatch 1"),
        ("node0:0", renamed(1, "1.0RF2", "1.1RF2"), "tensor rank 0: stage 1, chunk 1"),
        ("node2:1", added(1, "0.1RF1", "0.1RF2"), "step 1, tensor rank 1: stage 0, chunk 1"),
        ("node2:1", without(FATAL_STEP, "0.1RF0"), "step 2, tensor rank 1: stage 0, chunk 1"),
        ("node0:1", without(FATAL_STEP, "1.1B1"), "step 2, tensor rank 1: stage 1, chunk 1"),
        ("node0:1", renamed(3, "0.1B2", "0.0B2"), "tensor rank 1: node0 ran 0.0B2 2 times"),
    ],
)
def test_work_of_any_chunk_and_tensor_rank_is_judged(
    scenarios: ScenarioRunner,
    good_shared: FinishedJob,
    tmp_path: Path,
    worker: str,
    change: Callable[[list[Event]], list[Event]],
    complaint: str,
) -> None:
    job = copy_to_spoil(good_shared, tmp_path)
    change_events(job.job_dir / "events" / f"{worker}.jsonl", change)
    found = complaints(job, SHARED_EXPECTED, scenarios.undisturbed(SHARED))
    assert any(complaint in text for text in found), found


def spoil_one_bit(job: FinishedJob) -> None:
    path = next((job.job_dir / "state").glob("*-replica.safetensors"))
    tensors = load_file(path)
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    name = next(name for name in sorted(tensors) if name.endswith("exp_avg"))
    tensors[name].view(-1).view(torch.int32)[0] ^= 1
    save_file(tensors, path, metadata=metadata)


def spoil_start_time(job: FinishedJob) -> None:
    log = Path(job.request.folder) / "processes" / f"{SHADOW}.jsonl"
    change_events(log, lambda events: [events[0], events[1] | {"start_ticks": 1}])


def add_checkpoint(job: FinishedJob) -> None:
    (job.job_dir / "checkpoints").mkdir()


def add_loss(job: FinishedJob) -> None:
    log = job.job_dir / "losses.jsonl"
    first, *others = log.read_text().splitlines()
    values = json.loads(first)
    loss = float.fromhex(values["loss"]) * 1.0000001
    log.write_text("\n".join([json.dumps(values | {"loss": loss.hex()}), *others]) + "\n")


def restart_worker(job: FinishedJob) -> None:
    log = job.job_dir / "events" / f"{BYSTANDER}.jsonl"
    started = {"event": "worker_started", "pid": 7, "agent": 7}
    change_events(log, lambda events: [*events, events[0] | started])


@pytest.mark.parametrize(
    ("spoil", "complaint"),
    [
        (spoil_one_bit, "DIFFERENT"),
        (add_loss, "DIFFERENT"),
        (spoil_start_time, "node3 started as"),
        (restart_worker, "node1 is not the one process"),
        (add_checkpoint, "the job folder holds"),
    ],
)
def test_anything_else_that_is_not_as_it_must_be_is_seen(
    scenarios: ScenarioRunner,
    job: FinishedJob,
    spoil: Callable[[FinishedJob], None],
    complaint: str,
) -> None:
    spoil(job)
    found = complaints(job, EXPECTED, scenarios.undisturbed(SHAPE))
    assert any(complaint in text for text in found), found


def test_what_the_launcher_saw_counts(scenarios: ScenarioRunner, job: FinishedJob) -> None:
    undisturbed = scenarios.undisturbed(SHAPE)
    for result, complaint in (
        (replace(job.result, left_behind=["17"]), "left behind"),
        (replace(job.result, lost=[]), "lost are"),
        (replace(job.result, lines=job.result.lines[:-1]), "iteration lines of steps"),
        (replace(job.result, status=4, message="never came"), "status 4: never came"),
    ):
        found = complaints(replace(job, result=result), EXPECTED, undisturbed)
        assert any(complaint in text for text in found), found


def without_a_replica(job: FinishedJob, seconds: float) -> None:
    """The job ended so long after the takeover, and in the end one node alone held a stage."""
    lost_at = max(event["time"] for event in job.events("takeover"))

    def change(events: list[Event]) -> list[Event]:
        for event in events:
            if event["event"] == "finished_job":
                event["pipelines"][1]["replicas"][0] = None
                event["time"] = lost_at + seconds
        return events

    change_events(job.job_dir / "events" / "coordinator.jsonl", change)


def test_a_run_that_is_not_healed_in_time_is_seen(
    scenarios: ScenarioRunner, job: FinishedJob
) -> None:
    without_a_replica(job, seconds=2 * SECONDS_TO_HEAL)
    assert not ended_too_soon(job, EXPECTED)
    found = complaints(job, EXPECTED, scenarios.undisturbed(SHAPE))
    assert "1 stages were left with one holder" in found


def test_a_run_that_ends_before_it_can_heal_is_told_from_one_that_does_not(
    scenarios: ScenarioRunner, job: FinishedJob
) -> None:
    without_a_replica(job, seconds=SECONDS_TO_HEAL / 2)
    assert ended_too_soon(job, EXPECTED)
    found = complaints(job, EXPECTED, scenarios.undisturbed(SHAPE))
    assert not any("one holder" in text for text in found)
