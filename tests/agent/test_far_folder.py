"""Nodes that do not see the job's folder, with real processes and a real etcd."""

import json
import signal
from pathlib import Path

import pytest
from etcd_cluster import Cluster
from launching import WAIT_SECONDS, OpenJob

from megatron_bamboo.agent.far_folder import FarFolder
from megatron_bamboo.agent.job import JOB_FILE
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.secret_file import SECRET_FILE
from megatron_bamboo.membership.store_place import EtcdPlace

NOWHERE = "etcd://127.0.0.1:1"


@pytest.mark.multiprocess
def test_nodes_find_each_coordinator_and_the_jobs_end_in_etcd(
    open_job: OpenJob, etcd: Cluster, tmp_path: Path
) -> None:
    url = etcd.url("tests/agent/afar")
    script = ("--lease", "30", "--pause", "0.01", "--iters", "100000")
    job = open_job.start(3, *script, options=("--store", url))
    job.until((job.job_dir / ADDRESS_FILE).exists)
    secret = ("--secret-file", str(job.job_dir / SECRET_FILE))
    for node in ("a", "b", "c"):
        own = ("--job-dir", str(tmp_path / "own" / node))
        job.add(node, join=url, options=(*secret, *own))
    job.wait_for_step(2)
    job.process.kill()
    job.process.wait()
    # Where the nodes listen for it nobody has changed anything but etcd.
    (job.job_dir / ADDRESS_FILE).unlink()
    job.start(3, *script, options=("--store", url))
    reached = job.iterations()[-1]
    job.wait_for_step(reached + 5)
    assert json.loads((tmp_path / "own" / "a" / ADDRESS_FILE).read_text())["generation"] == 2
    assert job.events("loss") == []
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(WAIT_SECONDS) == 130
    for node in ("a", "b", "c"):
        assert job.end_of(node) == 0, job.said(node, "err")
        assert job.said(node).endswith(f"{node}: the job is over, with status 130\n")
        assert (tmp_path / "own" / node / "logs" / f"{node}.log").exists()
    assert [path.name for path in (job.job_dir / "logs").iterdir()] == ["coordinator.log"]


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--join", NOWHERE), f"--join {NOWHERE}: give the job's name too"),
        (("--join", "etcd://10.1.2.3:9/job"), "--join etcd://10.1.2.3:9/job: without TLS"),
        (("--join", "x/y", "--job-dir", "z"), "--job-dir z: only with --join etcd://"),
        (
            ("--join", f"{NOWHERE}/job", "--deadline", "0.3"),
            f"there is no coordinator in {NOWHERE}/job: was its bamboo coordinator started?",
        ),
    ],
)
def test_what_leads_to_no_job_in_etcd_is_named(
    options: tuple[str, ...],
    why: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert bamboo(["agent", *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert why in line


def test_the_jobs_own_folder_is_none_of_a_nodes_own(tmp_path: Path) -> None:
    (tmp_path / JOB_FILE).write_text("{}")
    (tmp_path / ADDRESS_FILE).write_text("{}")
    with pytest.raises(UserError, match=r"is the job's own folder: give --join .*coordinator.json"):
        FarFolder(EtcdPlace.parse(f"{NOWHERE}/job"), tmp_path)
    assert (tmp_path / ADDRESS_FILE).exists()
