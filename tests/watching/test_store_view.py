"""Looking into a job's folder while others write there, and afterwards."""

import os
from pathlib import Path

import pytest
from story import LAST_STEP, Story

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE, Address
from megatron_bamboo.membership.journal import JOURNAL_FILE, Journal
from megatron_bamboo.membership.table import Table
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.watching.status import Phase
from megatron_bamboo.watching.store_view import RECENT_STEPS, StoreWatcher
from megatron_bamboo.watching.summary import status_of


@pytest.fixture
def job_dir(tmp_path: Path) -> Path:
    JobShape(equal_pipelines(3, 2, 2), "lazy", LAST_STEP, 16).write(tmp_path)
    return tmp_path


def lead(job_dir: Path) -> tuple[Journal, Table]:
    journal = Journal(job_dir / JOURNAL_FILE)
    journal.claim(0.0)
    return journal, Table(journal)


def write(table: Table, story: Story, first_fact: int = 0) -> None:
    with table.together():
        table.set_all(story.keys)
        for fact in story.facts[first_fact:]:
            table.say(fact)


def test_a_look_sees_what_was_written_and_the_next_one_only_what_is_new(job_dir: Path) -> None:
    watcher, story = StoreWatcher(job_dir), Story().begin().train(30)
    assert status_of(watcher.look()).phase is Phase.STARTING
    journal, table = lead(job_dir)
    Address("127.0.0.1", 4242, 1, os.getpid()).write(job_dir / ADDRESS_FILE)
    write(table, story)
    view = watcher.look()
    assert view.history == story.history()
    newest = {f"passed/{step}" for step in range(31 - RECENT_STEPS, 31)}
    assert {key for key in view.keys if key.startswith("passed/")} == newest
    status = status_of(view)
    assert (status.phase, status.progress.step, status.epoch) == (Phase.RUNNING, 30, 0)
    assert status.coordinator is not None and status.coordinator.address == "127.0.0.1:4242"
    told = len(story.facts)
    write(table, story.lose("node1"), told)
    assert watcher.look().history == story.history() == StoreWatcher(job_dir).look().history
    journal.close()


def test_who_begins_to_look_after_the_next_coordinator_sees_the_same(job_dir: Path) -> None:
    story = Story().begin().train(5)
    journal, table = lead(job_dir)
    write(table, story)
    early = StoreWatcher(job_dir)
    early.look()
    journal.close()
    told = len(story.facts)
    successor = Journal(job_dir / JOURNAL_FILE)
    # The first leader is this process, and lives: no sign of life of it is new enough.
    successor.claim(-1.0)
    write(Table(successor), story.lose("node1").train(2), told)
    one, other = early.look(), StoreWatcher(job_dir).look()
    assert one.history == other.history == story.history()
    assert one.leader is not None and one.leader.generation == 2
    successor.close()


def test_looking_at_an_ended_job_leaves_nothing_behind(job_dir: Path) -> None:
    journal, table = lead(job_dir)
    write(table, Story().begin().train(3))
    journal.close()
    Outcome(Status.FINISHED).write(job_dir)
    before = {path.name: path.read_bytes() for path in job_dir.iterdir()}
    status = status_of(StoreWatcher(job_dir).look())
    assert (status.phase, status.ending, status.progress.step) == (Phase.ENDED, "finished", 3)
    assert {path.name: path.read_bytes() for path in job_dir.iterdir()} == before


def test_looking_holds_up_no_write(job_dir: Path) -> None:
    journal, table = lead(job_dir)
    write(table, Story().begin())
    watcher = StoreWatcher(job_dir)
    watcher.look()
    descriptors = len(os.listdir("/proc/self/fd"))
    for step in range(20):
        watcher.look()
        table.set("reported", str(step).encode())
    assert len(os.listdir("/proc/self/fd")) == descriptors
    journal.close()


def test_a_folder_without_a_job_is_refused(tmp_path: Path) -> None:
    for folder in (tmp_path, tmp_path / "none"):
        with pytest.raises(UserError, match=f"there is no job in {folder}: give the folder"):
            StoreWatcher(folder).look()


def test_a_store_that_cannot_be_read_is_said_in_one_line(job_dir: Path) -> None:
    (job_dir / JOURNAL_FILE).write_text("this is no store of any kind, but some text")
    with pytest.raises(UserError, match=r"cannot be read here .*: look at the job on the machine"):
        StoreWatcher(job_dir).look()
