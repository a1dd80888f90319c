"""Nodes that do not see the job's folder, with real processes and a real etcd."""

import contextlib
import json
import signal
import time
from pathlib import Path

import psutil
import pytest
from etcd_cluster import Cluster, cluster, make_certificates
from launching import WAIT_SECONDS, OpenJob

from megatron_bamboo.agent.far_folder import LOOK_SECONDS, FarFolder
from megatron_bamboo.agent.job import JOB_FILE
from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership import etcd_client
from megatron_bamboo.membership.address import ADDRESS_FILE, ADDRESS_KEY, Address
from megatron_bamboo.membership.etcd_client import EtcdClient
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


def said_in(path: Path) -> int:
    """The generation that a folder's address names; 0 while there is none."""
    return int(json.loads(path.read_text())["generation"]) if path.exists() else 0


@pytest.mark.multiprocess
def test_a_full_disk_is_no_end_of_what_is_copied(etcd: Cluster, tmp_path: Path) -> None:
    """A node that missed where the next coordinator is would be lost with it."""
    place = EtcdPlace.parse(etcd.url("tests/agent/full"))
    folder = FarFolder(place, tmp_path)
    copied = tmp_path / ADDRESS_FILE

    def lead(generation: int) -> None:
        value = b"{}\n" + Address("10.0.0.1", 4001, generation).to_json().encode()
        put = etcd_client.put(f"{place.name}/keys/{ADDRESS_KEY}", value)
        client.insist("kv/txn", etcd_client.transaction([], [put]), time.monotonic() + 10)

    def until_copied(generation: int, seconds: float = WAIT_SECONDS) -> bool:
        until = time.monotonic() + seconds
        while said_in(copied) != generation and time.monotonic() < until:
            time.sleep(0.05)
        return said_in(copied) == generation

    before = set(psutil.Process().children())
    with contextlib.closing(EtcdClient(place)) as client, folder.kept():
        (copier,) = set(psutil.Process().children()) - before
        lead(1)
        assert until_copied(1)
        # What has no room for a byte more is written by nobody, as on a full disk.
        unlimited = copier.rlimit(psutil.RLIMIT_FSIZE)
        copier.rlimit(psutil.RLIMIT_FSIZE, (0, unlimited[1]))
        lead(2)
        assert not until_copied(2, 3 * LOOK_SECONDS)
        copier.rlimit(psutil.RLIMIT_FSIZE, unlimited)
        assert until_copied(2)


@pytest.mark.multiprocess
@pytest.mark.parametrize("stranger", ["etcd", "node"])
def test_wrong_certificates_are_named_at_once(
    stranger: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Those of another authority, of whichever side; and not after ten minutes."""
    ours, theirs = (tmp_path / name for name in ("ours", "theirs"))
    files = {}
    for folder in (ours, theirs):
        folder.mkdir()
        files[folder] = make_certificates(folder)
    cacert = files[theirs if stranger == "etcd" else ours].cacert
    own = files[ours if stranger == "etcd" else theirs]
    monkeypatch.chdir(tmp_path)
    with cluster(1, files[ours]) as member:
        url = f"{member.url('tests/job')}?cacert={cacert}&cert={own.cert}&key={own.key}"
        assert bamboo(["agent", "--join", url, "--job-dir", "own"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "does not answer: " in line and line.endswith(": give the files of that etcd")
