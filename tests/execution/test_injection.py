"""A fault strikes before one action of one step, and takes the whole process group along."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from megatron_bamboo.execution.injection import kill_before
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.schedule.actions import Action

FATAL = Action.parse("2.0B3")
Kills = list[tuple[int, int]]


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path, "node0")
    yield log
    log.close()


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Kills:
    """What would have been killed."""
    seen: Kills = []
    monkeypatch.setattr(os, "killpg", lambda group, number: seen.append((group, number)))
    return seen


def test_only_that_action_of_that_step_is_fatal(
    events: EventLog, kills: Kills, tmp_path: Path
) -> None:
    before = kill_before("iter7:2.0B3", events)
    for action, step in ((FATAL, 6), (FATAL, 8), (Action.parse("2.0F3"), 7)):
        before(action, step)
    assert not kills and not read_events(tmp_path)
    before(FATAL, 7)
    assert kills == [(os.getpgrp(), signal.SIGKILL)]
    (event,) = read_events(tmp_path)
    assert (event["event"], event["action"], event["step"]) == ("kill", "2.0B3", 7)


def test_tail_actions_can_be_fatal(events: EventLog, kills: Kills) -> None:
    kill_before("iter12:1COMMIT", events)(Action.parse("1COMMIT"), 12)
    assert len(kills) == 1


def test_no_fault_kills_nobody(events: EventLog, kills: Kills) -> None:
    kill_before("", events)(FATAL, 7)
    assert not kills


@pytest.mark.parametrize(
    "text", ["7:2.0B3", "iter7", "iter:2.0B3", "iter7:", "iter7:2.0X3", "iter-1:2.0B3"]
)
def test_what_is_no_fault_is_refused(text: str, events: EventLog) -> None:
    with pytest.raises(ValueError):
        kill_before(text, events)
