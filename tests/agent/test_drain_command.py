"""``bamboo drain`` without a job that it could speak to: one line that says how to mend it."""

import json
from pathlib import Path

import pytest

from megatron_bamboo.cli import main as bamboo


def running(folder: Path) -> Path:
    """What shows that a job runs in a folder; nobody listens at its address."""
    folder.mkdir(parents=True)
    address = {"host": "127.0.0.1", "port": 1, "generation": 1, "pid": 1}
    (folder / "coordinator.json").write_text(json.dumps(address))
    return folder


def test_a_folder_without_a_running_job_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bamboo(["drain", "node1", "--job-dir", str(tmp_path)]) == 2
    assert capsys.readouterr().err == (
        f"bamboo drain: --job-dir {tmp_path}: no job runs there; give the folder of one\n"
    )


@pytest.mark.parametrize("jobs", [(), ("one", "two")])
def test_without_a_folder_exactly_one_job_must_run(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    jobs: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in jobs:
        running(tmp_path / "runs" / name)
    assert bamboo(["drain", "node1"]) == 2
    names = ", ".join(f"runs/{name}" for name in jobs) or "none"
    assert capsys.readouterr().err == (
        f"bamboo drain: say with --job-dir which job; running in runs/: {names}\n"
    )


@pytest.mark.parametrize("seconds", ["nan", "inf", "-1"])
def test_what_is_no_time_to_wait_is_named(capsys: pytest.CaptureFixture[str], seconds: str) -> None:
    assert bamboo(["drain", "node1", "--wait", seconds]) == 2
    assert "bamboo drain: --wait must be more than 0" in capsys.readouterr().err


def test_a_job_that_does_not_answer_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("megatron_bamboo.agent.asking.ANSWER_SECONDS", 0.3)
    monkeypatch.chdir(tmp_path)
    running(tmp_path / "runs" / "one")
    monkeypatch.setenv("BAMBOO_SECRET", "5" * 64)
    assert bamboo(["drain", "node1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("bamboo drain: the job in runs/one does not answer: is it over?")
    assert said.count("\n") == 1
