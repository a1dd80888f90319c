"""``bamboo run`` and ``bamboo coordinator`` with their store in etcd, with real processes."""

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator

import psutil
import pytest
from etcd_cluster import Cluster, cluster
from launching import Launch, OpenJob

from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.membership.store_place import STORE_FILE
from megatron_bamboo.watching.status import Phase
from megatron_bamboo.watching.store_view import StoreWatcher
from megatron_bamboo.watching.summary import status_of

pytestmark = pytest.mark.multiprocess


@pytest.fixture
def member() -> Iterator[Cluster]:
    """One that may be harmed."""
    with cluster(1) as running:
        yield running


def leader(launch: Launch) -> int:
    """The process that leads."""
    path = launch.job_dir / ADDRESS_FILE
    launch.until(path.exists)
    return int(json.loads(path.read_text())["pid"])


def check_story(launch: Launch, num_iterations: int, lost: list[str]) -> None:
    """Everything was said and done once, whoever led."""
    assert launch.iterations() == list(range(1, num_iterations + 1))
    losses = [json.loads(line)["step"] for line in (launch.job_dir / "losses.jsonl").open()]
    assert losses == launch.iterations()
    assert [event["node"] for event in launch.events("loss")] == lost
    plans = launch.events("plan")
    assert [event["epoch"] for event in plans] == list(range(len(plans)))
    assert len(launch.events("finished_job")) == 1
    assert not (launch.job_dir / JOURNAL_FILE).exists()


def test_coordinators_die_around_a_loss_and_nothing_is_lost(launch: Launch, etcd: Cluster) -> None:
    faults = ("before:lost/node1", "after:plan/1")
    options = [part for fault in faults for part in ("--inject", f"coordinator@{fault}")]
    options += ["--inject", "node1@iter2:1.0F0", "--store", etcd.url("tests/agent/deaths")]
    launch.start(3, options=tuple(options)).wait(0)
    check_story(launch, 4, ["node1"])
    assert [e["generation"] for e in launch.events("coordinator_kill")] == [1, 2]
    status = status_of(StoreWatcher(launch.job_dir).look())
    assert (status.phase, status.progress.step) == (Phase.ENDED, 4)


def test_a_job_waits_for_an_etcd_that_is_away_and_goes_on(launch: Launch, member: Cluster) -> None:
    """Longer than the coordinator's lease: its successor goes on, and no node was lost."""
    options = ("--store", member.url("job"))
    launch.start(3, "--iters", "30", "--pause", "0.01", "--lease", "3", options=options)
    launch.wait_for_step(3)
    member.suspend()
    time.sleep(6.0)
    assert launch.process.poll() is None
    member.resume()
    launch.wait(0)
    check_story(launch, 30, [])


def test_a_coordinator_that_is_started_anew_goes_on_with_the_job(
    open_job: OpenJob, etcd: Cluster
) -> None:
    """By nothing but what etcd holds: not even what was told before is taken from the folder."""
    options = ("--store", etcd.url("tests/agent/hosts"))
    script = ("--iters", "20", "--pause", "0.05")
    open_job.start(3, *script, options=options).add("node0", "node1", "node2")
    open_job.wait_for_step(2)
    status = status_of(StoreWatcher(open_job.job_dir).look())
    assert (status.phase, status.coordinator is not None) == (Phase.RUNNING, True)
    first = psutil.Process(leader(open_job))
    os.kill(open_job.process.pid, signal.SIGKILL)
    open_job.process.wait()
    psutil.wait_procs([first], timeout=20)
    (open_job.job_dir / "losses.jsonl").unlink()
    shutil.rmtree(open_job.job_dir / "events" / "coordinator", ignore_errors=True)
    open_job.start(3, *script, options=options).wait(0)
    assert "coordinator 2 goes on" in open_job.out
    assert open_job.events("loss") == []
    losses = [json.loads(line)["step"] for line in (open_job.job_dir / "losses.jsonl").open()]
    assert losses == list(range(1, 21))
    assert {open_job.end_of(node) for node in open_job.nodes} == {0}


def test_who_goes_on_with_a_job_has_its_store(open_job: OpenJob, etcd: Cluster) -> None:
    url = etcd.url("tests/agent/other")
    open_job.start(1, "--stages", "1", "--redundancy", "none", "--iters", "1000", "--pause", "0.05",
                   options=("--store", url)).add("node0")  # fmt: skip
    open_job.wait_for_step(1)
    assert (open_job.job_dir / STORE_FILE).read_text() == f"{url}\n"
    os.kill(open_job.process.pid, signal.SIGKILL)
    open_job.process.wait()
    open_job.start(1, "--stages", "1", "--redundancy", "none", "--iters", "1000")
    assert open_job.process.wait(30) == 2
    assert f"has its store at {url}: give the same" in open_job.err
