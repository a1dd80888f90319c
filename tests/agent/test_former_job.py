"""What a folder says of the job that was in it."""

from pathlib import Path

import pytest

from megatron_bamboo.agent.former_job import check_is_new
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.telling import LOSSES_FILE
from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.events import EventLog


def refusal(folder: Path) -> str:
    with pytest.raises(UserError) as refused:
        check_is_new(folder)
    return str(refused.value)


def test_an_ended_job_is_named_with_its_outcome_and_its_checkpoint(tmp_path: Path) -> None:
    events = EventLog(tmp_path / "events", "coordinator")
    for step, failure in ((4, None), (8, None), (12, "no room")):
        events.emit("checkpoint", step=step, folder="/far/saved", failure=failure, seconds=1.0)
    events.close()
    Outcome(Status.STOPPED, "stopped").write(tmp_path)
    assert refusal(tmp_path) == (
        f"{tmp_path} already holds a job, which has ended (status 6, stopped): give another "
        "--job-dir; with --load /far/saved it goes on after step 8"
    )


def test_a_job_without_a_checkpoint_is_said_to_have_none(tmp_path: Path) -> None:
    (tmp_path / LOSSES_FILE).write_text("{}\n")
    Outcome(Status.NO_HOLDER).write(tmp_path)
    line = refusal(tmp_path)
    assert "(status 3, no holder)" in line
    assert line.endswith("; there is no checkpoint of it to go on from")


def test_a_job_that_trained_nothing_leaves_nothing_to_keep(tmp_path: Path) -> None:
    Outcome(Status.INTERRUPTED).write(tmp_path)
    line = refusal(tmp_path)
    assert "(status 130, interrupted): give another --job-dir; nothing was trained in" in line


def test_one_that_has_not_ended_and_a_new_folder(tmp_path: Path) -> None:
    check_is_new(tmp_path)
    (tmp_path / "logs").mkdir()
    assert refusal(tmp_path) == f"{tmp_path} already holds a run: give another --job-dir"
