"""Machines that are not like a job's nodes, or not ready for its data, with real processes."""

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launching import WAIT_SECONDS, OpenJob

from megatron_bamboo.agent.marks import PACKAGE
from megatron_bamboo.membership.address import ADDRESS_FILE

pytestmark = pytest.mark.multiprocess

LEASE = ("--lease", "30", "--pause", "0.01", "--iters", "100000")


def agent_of_other_code(job: OpenJob, folder: Path) -> subprocess.CompletedProcess[str]:
    """An agent of a package in which a line is another one, from its start to its end."""
    shutil.copytree(PACKAGE, folder / PACKAGE.name)
    with (folder / PACKAGE.name / "worker.py").open("a") as file:
        file.write("# changed\n")
    command = ("agent", "--join", str(job.job_dir / ADDRESS_FILE), "--node", "other-code")
    return subprocess.run(
        [sys.executable, "-m", "megatron_bamboo", *command],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
    )


def test_who_has_other_code_or_data_is_refused_and_the_job_says_so(
    open_job: OpenJob, tmp_path: Path
) -> None:
    data = tmp_path / "text.bin"
    data.write_bytes(b"one text")
    script = (*LEASE, "--data", str(data))
    job = open_job.start(3, *script).add("a", "b", "c")
    job.wait_for_step(2)
    data.write_bytes(b"two text")
    assert job.add("other-data").end_of("other-data") == 2
    (line,) = job.said("other-data", "err").splitlines()
    assert line.startswith("bamboo agent: this machine's code or data are not the job's: --data ")
    why = line.removeprefix("bamboo agent: ")
    job.until(lambda: f"refused other-data: {why}" in job.out)
    data.write_bytes(b"one text")
    ended = agent_of_other_code(job, tmp_path / "elsewhere")
    assert ended.returncode == 2
    assert "the job's: megatron_bamboo/worker.py: here " in ended.stderr
    job.until(lambda: "refused other-code: this machine's code or data are not" in job.out)
    # Again, and it is not said again.
    data.write_bytes(b"two text")
    assert job.add("other-data").end_of("other-data") == 2
    job.wait_for_step(job.iterations()[-1] + 2)
    assert [e["node"] for e in job.events("refused")] == ["other-data", "other-code"]
    assert set(job.agents()) == {"a", "b", "c"} and job.events("loss") == []
    # Nor may the job go on by a coordinator that would tell its nodes otherwise.
    job.process.kill()
    job.process.wait()
    assert job.start(3, *script).process.wait(WAIT_SECONDS) == 2
    assert f"begun with other code or data, and has not ended: --data {data}: here " in job.err


def test_the_interface_that_the_script_names_must_be_there(open_job: OpenJob) -> None:
    job = open_job.start(3, *LEASE, "--interface", "none0")
    job.until((job.job_dir / ADDRESS_FILE).exists)
    job.add("c", options=("--interface", "lo"))
    assert job.add("a").end_of("a") == 2
    line = "--bamboo-interface none0: this machine has lo"
    assert line in job.said("a", "err")
    job.until(lambda: f"refused a: {line}" in job.out and "c" in job.agents())


def test_a_node_builds_the_index_caches_that_it_does_not_see_before_it_joins(
    open_job: OpenJob, tmp_path: Path
) -> None:
    indices = tmp_path / "indices"
    job = open_job.start(3, *LEASE, "--indices", str(indices))
    job.until((job.job_dir / ADDRESS_FILE).exists)
    indices.rmdir()
    assert job.add("a").until(lambda: "a" in job.agents())
    assert f"builds the index caches of its data in {indices} before it joins" in job.said("a")
    assert indices.is_dir()
    job.add("b", "c").wait_for_step(1)
    assert "index caches" not in job.said("b") + job.said("c")
    indices.rmdir()
    indices.touch()
    assert job.add("d").end_of("d") == 2
    job.until(lambda: f"refused d: the index caches of the data could not be built in {indices}"
              in job.out)  # fmt: skip
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(WAIT_SECONDS) == 130
