"""Coordinators that wait beside the one that leads, with real processes."""

import json
import re
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

import pytest
from etcd_cluster import Cluster
from launching import WAIT_SECONDS, OpenJob
from needs import missing

from megatron_bamboo.agent.job_folder import LOCK_FILE
from megatron_bamboo.membership.address import ADDRESS_FILE

pytestmark = pytest.mark.multiprocess

MACHINE = ("--pid", "--fork", "--mount-proc", "--kill-child=SIGKILL")


def until_said(job: OpenJob, who: str, text: str) -> None:
    """Wait until a standby has said something."""
    limit = time.monotonic() + WAIT_SECONDS
    while text not in job.said(who):
        assert time.monotonic() < limit and job.standbys[who].poll() is None, job.said(who, "err")
        time.sleep(0.05)


def another_machine() -> tuple[str, ...]:
    """Runs a program with process numbers of its own, which all end with it."""
    unshare = shutil.which("unshare")
    if unshare is None or subprocess.run([unshare, *MACHINE, "true"], check=False).returncode:
        missing("netns", "process namespaces are not permitted here")
    return (unshare, *MACHINE)


def check_steps(job: OpenJob, number: int) -> None:
    """Each was said once, and no node was lost."""
    losses = [json.loads(line)["step"] for line in (job.job_dir / "losses.jsonl").open()]
    assert losses == list(range(1, number + 1))
    assert json.loads((job.job_dir / "outcome.json").read_text())["lost"] == []


def test_one_goes_on_in_the_place_of_a_leader_that_dies_and_the_next_one_ends_with_the_job(
    open_job: OpenJob,
) -> None:
    script = ("--lease", "30", "--pause", "0.02", "--iters", "100")
    job = open_job.start(3, *script).add("a", "b", "c")
    job.wait_for_step(2)
    port = json.loads((job.job_dir / ADDRESS_FILE).read_text())["port"]
    leader = job.process.pid
    first = job.stand_by(3, *script, options=("--port", str(port)))
    until_said(job, first, f"stands by: process {leader} on {socket.gethostname()} leads the job")
    job.process.kill()
    job.process.wait()
    until_said(job, first, "coordinator 2 goes on")
    second = job.stand_by(3, *script)
    until_said(job, second, f"stands by: process {job.standbys[first].pid} on ")
    # It has the port that it was given, though that was busy when it began to wait.
    address = json.loads((job.job_dir / ADDRESS_FILE).read_text())
    assert (address["port"], address["generation"]) == (port, 2)
    for standby in (first, second):
        assert job.standbys[standby].wait(WAIT_SECONDS) == 0, job.said(standby, "err")
    assert job.said(second).endswith(f"the job in {job.job_dir} is over, with status 0\n")
    check_steps(job, 100)


def test_one_whose_own_time_is_over_or_that_is_interrupted_has_not_led(open_job: OpenJob) -> None:
    script = ("--lease", "30", "--pause", "0.01", "--iters", "100000")
    job = open_job.start(3, *script)
    job.until((job.job_dir / ADDRESS_FILE).exists)
    for number, status in ((signal.SIGUSR1, 6), (signal.SIGINT, 130)):
        name = job.stand_by(3, *script)
        until_said(job, name, "stands by: ")
        job.standbys[name].send_signal(number)
        assert job.standbys[name].wait(WAIT_SECONDS) == status
    assert job.said(name, "err") == "bamboo coordinator: interrupted; it has not led\n"
    assert job.process.poll() is None


def test_with_etcd_one_on_another_machine_waits_for_the_end_of_the_leaders_lease(
    open_job: OpenJob, etcd: Cluster
) -> None:
    options = ("--store", etcd.url("tests/agent/standing-by"))
    script = ("--lease", "5", "--pause", "0.05", "--iters", "150")
    before = another_machine()
    job = open_job.start(3, *script, options=options, before=before).add("a", "b", "c")
    job.wait_for_step(2)
    # On a file system that keeps locks on one machine only, nobody here sees any.
    (job.job_dir / LOCK_FILE).unlink()
    standby = job.stand_by(3, *script, options=options)
    until_said(job, standby, "stands by: coordinator 1 on another machine leads the job in ")
    (job.job_dir / LOCK_FILE).unlink()
    third = OpenJob(Path(job.job_dir).parent / "third")
    third.folder.mkdir()
    third.job_dir = job.job_dir
    assert third.start(3, *script, options=options).process.wait(WAIT_SECONDS) == 2
    assert re.search(r"has a coordinator already on another machine \(coordinator 1, ", third.err)
    job.process.kill()
    job.process.wait()
    assert job.standbys[standby].wait(WAIT_SECONDS) == 0, job.said(standby, "err")
    assert "coordinator 2 goes on" in job.said(standby)
    check_steps(job, 150)


def test_with_its_store_in_a_file_of_another_machine_nobody_can_go_on(
    open_job: OpenJob, tmp_path: Path
) -> None:
    job = open_job.start(3, "--iters", "100000")
    job.until((job.job_dir / ADDRESS_FILE).exists)
    (job.job_dir / LOCK_FILE).write_text("process 7 on elsewhere\n")
    name = job.stand_by(3, "--iters", "100000")
    assert job.standbys[name].wait(WAIT_SECONDS) == 2
    assert "is a file of elsewhere: stand by there, or begin" in job.said(name, "err")
