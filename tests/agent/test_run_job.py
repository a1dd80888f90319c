"""A job as a library call, with nodes and workers forked from the caller."""

import os
import threading
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from fake_training import main
from launching import processes_of

from megatron_bamboo.agent.agent import AgentSettings, StartNode, forked_node, forked_worker
from megatron_bamboo.agent.job import Deadlines, Injection, JobShape, JobSpec
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.process import ForkedNode, NodeHandle, fork
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.planner.arrangement import equal_pipelines

pytestmark = pytest.mark.multiprocess

SHAPE = JobShape(equal_pipelines(3, 2, 2), "lazy", train_iters=3, global_batch_size=16)
NODES = tuple(f"node{number}" for number in range(6))


def run(spec: JobSpec, *arguments: str) -> tuple[Outcome, list[str]]:
    lines: list[str] = []
    script = ["--stages", "3", "--pipelines", "2", "--iters", "3", *arguments]
    start_node = forked_node(forked_worker(lambda: main(script)))
    outcome = run_job(spec, start_node, lines.append)
    joined = [e for e in read_events(spec.job_dir / "events") if e["event"] == "agent_joined"]
    assert len(joined) == len(spec.nodes)
    assert processes_of({event["pid"] for event in joined}) == []
    return outcome, lines


def test_forked_workers_train_and_are_taken_over(tmp_path: Path) -> None:
    injections = (Injection.parse("node5@iter2:2.0B1"), Injection.parse("node1@iter3:1.0F0"))
    outcome, lines = run(JobSpec(NODES, SHAPE, tmp_path, injections))
    assert (outcome.status, outcome.message) == (Status.FINISHED, "")
    assert [node for node, _ in outcome.lost] == ["node5", "node1"]
    assert sum("] iteration " in line for line in lines) == 3


def test_many_jobs_run_one_after_another_in_one_process(tmp_path: Path) -> None:
    descriptors, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
    for number in range(3):
        outcome, _ = run(JobSpec(NODES, SHAPE, tmp_path / str(number)))
        assert outcome.status is Status.FINISHED
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert threading.active_count() == threads


def test_an_injection_never_reached_is_reported(tmp_path: Path) -> None:
    injections = (Injection.parse("node0@iter2:2.0B1"),)
    outcome, _ = run(JobSpec(NODES, SHAPE, tmp_path, injections))
    assert outcome.status is Status.INJECTION_NOT_REACHED


def test_an_injection_that_cannot_be_reached_is_refused(tmp_path: Path) -> None:
    for text, match in (("node0@iter9:2.0B1", "iteration 9"), ("node7@iter1:2.0B1", "no node7")):
        with pytest.raises(UserError, match=match):
            run(JobSpec(NODES, SHAPE, tmp_path, (Injection.parse(text),)))
    assert list(tmp_path.iterdir()) == []


def test_a_stage_without_holder_ends_the_job(tmp_path: Path) -> None:
    shape = JobShape(equal_pipelines(3, 1, 2), "none", 3, 16)
    outcome, _ = run(JobSpec(NODES[:3], shape, tmp_path, (Injection.parse("node2@iter2:2.0B1"),)))
    assert (outcome.status, outcome.lost[0][0]) == (Status.NO_HOLDER, "node2")
    assert "pipeline 0: stage 2" in outcome.message


def test_workers_that_stand_still_end_the_job(tmp_path: Path) -> None:
    spec = JobSpec(NODES, SHAPE, tmp_path, deadlines=Deadlines(stall_seconds=1))
    ways = [part for node in NODES for part in ("--misbehave", f"{node}:hang@1")]
    outcome, _ = run(spec, *ways)
    assert (outcome.status, outcome.message) == (Status.FAILED, "no iteration passed within 1 s")


def test_training_that_cannot_go_on_ends_the_job_and_loses_no_node(tmp_path: Path) -> None:
    ways = [part for node in NODES for part in ("--misbehave", f"{node}:give-up@2")]
    outcome, _ = run(JobSpec(NODES, SHAPE, tmp_path), *ways)
    assert (outcome.status, outcome.message) == (Status.FAILED, "step 2: the loss is nan")
    assert outcome.lost == ()


def failing_at_first(node: str, times: int, start: StartNode) -> StartNode:
    """Of a node so many starts end before its agent has said a word."""
    starts: Counter[str] = Counter()

    def start_node(settings: AgentSettings) -> NodeHandle:
        starts[settings.node] += 1
        if settings.node == node and starts[node] <= times:
            return ForkedNode(fork(lambda: 1))
        return start(settings)

    return start_node


def test_a_node_that_ends_before_its_hello_is_started_again(tmp_path: Path) -> None:
    steps = 40
    script = ["--stages", "3", "--pipelines", "2", "--iters", str(steps), "--pause", "0.02"]

    def work() -> int:
        if os.environ["BAMBOO_NODE"] == "node5.2":  # it has joined, and that is all
            time.sleep(60)
        return main(script)

    spec = JobSpec(
        NODES,
        replace(SHAPE, train_iters=steps),
        tmp_path,
        (Injection.parse("node5@iter2:2.0B1"),),
        respawn_seconds=0.1,
    )
    lines: list[str] = []
    start_node = failing_at_first("node5.2", 2, forked_node(forked_worker(work)))
    outcome = run_job(spec, start_node, lines.append)
    assert (outcome.status, [node for node, _ in outcome.lost]) == (Status.FINISHED, ["node5"])
    assert sum("node5 is back as node5.2" in line for line in lines) == 1


def test_nodes_that_never_say_hello_end_the_job(tmp_path: Path) -> None:
    spec = JobSpec(NODES, SHAPE, tmp_path, respawn_seconds=0.1, max_failures=3)
    start_node = failing_at_first("node5", 99, forked_node(forked_worker(lambda: 1)))
    outcome = run_job(spec, start_node, lambda _: None)
    assert outcome.status is Status.NO_PROGRESS
    assert outcome.message.endswith(
        "more than 3 times since an iteration passed, at last node5; look at the logs in "
        f"{tmp_path / 'logs'}"
    )


def test_a_checkpoint_of_the_last_step_leaves_nothing_to_train(tmp_path: Path) -> None:
    shape = replace(SHAPE, start_step=3, loaded_from="/ckpt")
    lines: list[str] = []
    start_node = forked_node(forked_worker(lambda: 1))
    outcome = run_job(JobSpec(NODES, shape, tmp_path), start_node, lines.append)
    assert (outcome.status, outcome.message) == (Status.FINISHED, "")
    assert lines == ["nothing to train: /ckpt holds step 3 already"]
