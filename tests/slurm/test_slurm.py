"""Jobs on a real Slurm, started by the scripts of ``scripts/slurm`` as their user would.

Needs root: the daemons run as root, and each node has a PID namespace.
"""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_cluster import ROOT, SlurmCluster, slurm_cluster
from slurm_job import THESE, SlurmJob, losses_of, toy
from tiny_gpt import prepare_text

pytestmark = [pytest.mark.multiprocess, pytest.mark.timeout(600)]

LEASE = ("--lease", "20", "--pause", "0.02")


@pytest.fixture
def cluster() -> Iterator[SlurmCluster]:
    """One node that stays, and four that do not."""
    with slurm_cluster(5) as started:
        yield started


def test_an_allocation_loses_a_node_and_trains_on(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(cluster, tmp_path, toy(tmp_path, 3, *LEASE, "--iters", "60"))
    nodes = job.submit("one_allocation.sbatch", {}, "--nodes=4")
    cluster.until(lambda: len(job.joined()) == 4 and job.steps(), "training nodes")
    victim = job.stages()[1]
    cluster.kill_node(victim)
    cluster.say_down(victim)
    outcome = job.outcome()
    assert outcome["status"] == 0, outcome
    assert [node for node, _ in outcome["lost"]] == [victim]
    assert job.steps() == list(range(1, 61))
    cluster.until(lambda: not cluster.queue(nodes), "end of the allocation")
    for number in (job.coordinator, nodes):
        cluster.until(lambda number=number: not cluster.queue(number), "end of all jobs")
    assert cluster.exit_status(job.coordinator) == "COMPLETED 0"


@pytest.mark.slow
def test_tasks_of_an_array_come_go_and_are_used_again(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    options = (*LEASE, "--iters", "100000", "--checkpoint", str(checkpoint))
    job = SlurmJob(cluster, tmp_path, toy(tmp_path, 3, *options))
    array = job.submit("elastic_array.sbatch", {}, "--array=0-3")
    cluster.until(lambda: len(job.joined()) == 4 and job.steps(), "training nodes")

    victim = job.stages()[1]
    task = cluster.task_on(victim)
    cluster.kill_node(victim)
    cluster.until(lambda: len(job.events("changed")) == 1, "standby in the victim's place")
    assert victim not in job.stages()
    # The machine has started anew: Slurm finds that its task is not there.
    cluster.start_node(victim)
    cluster.start_requeued(task)
    cluster.until(lambda: f"{victim}.2" in job.joined(), "node that is back")

    # Its task is to go to another machine: it is told so, and leaves in time.
    leaver, lost = job.stages()[0], len(job.events("loss"))
    task = cluster.task_on(leaver)
    cluster.run("scontrol", "requeue", task)
    cluster.until(lambda: f"{victim}.2" in job.stages(), "work for the node that is back")
    cluster.until(lambda: [e["node"] for e in job.events("drained")] == [leaver], "leave")
    assert len(job.events("loss")) == lost == 1
    cluster.start_requeued(task)
    cluster.until(lambda: f"{leaver}.2" in job.joined(), "node that has left and is back")

    # Another one is only told to leave: its script itself asks for another start, of this task
    # alone (the number of the last one is the whole array's).
    last = f"{array}_3"
    machine = cluster.node_of(last)
    cluster.run("scancel", "--signal=TERM", last)
    cluster.until(lambda: cluster.queue(last) == ["PENDING"], "requeue by the script")
    assert cluster.queue(array).count("RUNNING") == 3
    drained = [event["node"] for event in job.events("drained")]
    assert [node.partition(".")[0] for node in drained] == [leaver, machine]
    assert len(job.events("loss")) == 1
    job.wait_for_steps(2)

    # The end of the coordinator's time.
    cluster.run("scancel", "--batch", "--signal=USR1", job.coordinator)
    outcome = job.outcome()
    assert outcome["status"] == 6, outcome
    assert checkpoint.read_text() == str(job.steps()[-1])
    assert job.steps() == list(range(1, len(job.steps()) + 1))
    cluster.until(lambda: not cluster.queue(job.coordinator), "end of the coordinator")
    assert cluster.exit_status(job.coordinator) == "FAILED 6"
    cluster.until(lambda: set(cluster.queue(array)) <= {"PENDING"}, "end of all nodes")


@pytest.mark.slow
def test_cancelling_the_coordinator_ends_all(cluster: SlurmCluster, tmp_path: Path) -> None:
    job = SlurmJob(cluster, tmp_path, toy(tmp_path, 3, *LEASE, "--iters", "100000"))
    array = job.submit("elastic_array.sbatch", {}, "--array=0-2")
    cluster.until(job.steps, "training nodes")
    cluster.run("scancel", job.coordinator)
    assert job.outcome()["status"] == 130
    cluster.until(lambda: not cluster.queue(array), "end of all nodes")


TINY_GPT = (
    *("--num-layers", "3", "--pipeline-model-parallel-size", "3", "--hidden-size", "32"),
    *("--num-attention-heads", "2", "--seq-length", "16", "--max-position-embeddings", "16"),
    *("--micro-batch-size", "1", "--global-batch-size", "4", "--train-iters", "40"),
    *("--lr-warmup-iters", "2", "--split", "100,0,0", "--bamboo-lease", "20"),
)


def pretrain_gpt(folder: Path, name: str, *flags: str) -> tuple[str, ...]:
    """The plain script on data made in a folder."""
    data = [str(folder / file) for file in ("vocab.json", "merges.txt", "tiny_text_document")]
    launch = ("env", "NODES=3", "bash", "scripts/pretrain_gpt.sh")
    return (*launch, str(folder / name), *data, *TINY_GPT, *flags)


@pytest.mark.slow
def test_a_gpt_loses_a_node_of_its_allocation_and_no_bit(
    cluster: SlurmCluster, tmp_path: Path
) -> None:
    prepare_text(tmp_path)
    job = SlurmJob(cluster, tmp_path, " ".join(pretrain_gpt(tmp_path, "checkpoints")))
    job.submit("one_allocation.sbatch", {}, "--nodes=3")
    cluster.until(lambda: len(job.steps()) > 2, "steps", 300)
    victim = job.stages()[1]
    cluster.kill_node(victim)
    assert job.outcome()["status"] == 0
    assert [event["node"] for event in job.events("loss")] == [victim]
    assert (tmp_path / "checkpoints" / "latest_checkpointed_iteration.txt").read_text() == "40"
    undisturbed = tmp_path / "undisturbed"
    launch = {"BAMBOO_LAUNCH": f"run --job-dir {undisturbed}"}
    command = pretrain_gpt(tmp_path, "other", "--bamboo-redundancy", "none")
    subprocess.run(command, check=True, cwd=ROOT, env={**os.environ, **THESE, **launch})
    assert losses_of(job.job_dir) == losses_of(undisturbed)
