"""A fault strikes just before its action, once, and as it is told to."""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.execution.errors import TrainingError
from megatron_bamboo.execution.injection import InjectedError, Injector, save_injector, strike
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.schedule.actions import Action

FATAL = Action.parse("2.0B3")
COMMIT = Action.parse("2COMMIT")
Kills = list[tuple[int, int]]


class HangOver(Exception):
    """Ends what would last for ever."""


class Room:
    """Where a worker says that it is in an action."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int]] = []

    def within(self, action: Action, step: int) -> AbstractContextManager[None]:
        self.seen.append((str(action), step))
        return nullcontext()


@pytest.fixture
def events(tmp_path: Path) -> Iterator[EventLog]:
    log = EventLog(tmp_path, "node0")
    yield log
    log.close()


@pytest.fixture
def kills(monkeypatch: pytest.MonkeyPatch) -> Kills:
    """What would have been sent a signal."""
    seen: Kills = []
    monkeypatch.setattr(os, "killpg", lambda group, number: seen.append((-group, number)))
    monkeypatch.setattr(os, "kill", lambda pid, number: seen.append((pid, number)))
    return seen


@pytest.fixture
def room() -> Room:
    return Room()


def test_only_that_action_of_that_step_is_fatal(
    events: EventLog, kills: Kills, room: Room, tmp_path: Path
) -> None:
    injector = Injector("iter7:2.0B3", events, room.within, {})
    for action, step in ((FATAL, 6), (FATAL, 8), (Action.parse("2.0F3"), 7)):
        injector.before_action(action, step)
    assert not kills and not read_events(tmp_path)
    injector.before_action(FATAL, 7)
    assert kills == [(-os.getpgrp(), signal.SIGKILL)]
    (event,) = read_events(tmp_path)
    assert (event["event"], event["action"], event["step"]) == ("fault", "2.0B3", 7)
    assert (event["fault"], event["how"]) == ("iter7:2.0B3", "kill")


def test_it_strikes_once(events: EventLog, kills: Kills, room: Room) -> None:
    injector = Injector("iter7:2.0B3:stop", events, room.within, {})
    for _ in range(2):
        injector.before_action(FATAL, 7)
    assert kills == [(-os.getpgrp(), signal.SIGSTOP)]


def test_tail_actions_can_be_fatal(events: EventLog, kills: Kills, room: Room) -> None:
    Injector("iter12:2COMMIT", events, room.within, {}).before_action(COMMIT, 12)
    assert len(kills) == 1


def test_no_fault_kills_nobody(events: EventLog, kills: Kills, room: Room) -> None:
    Injector("", events, room.within, {}).before_action(FATAL, 7)
    assert not kills


def test_the_nth_action_of_a_step_is_fatal(
    events: EventLog, kills: Kills, room: Room, tmp_path: Path
) -> None:
    injector = Injector("iter2:#2", events, room.within, {})
    for step in (1, 1, 1, 2):
        injector.before_action(FATAL, step)
    assert not kills
    injector.before_action(COMMIT, 2)
    (event,) = read_events(tmp_path)
    assert (len(kills), event["action"], event["step"]) == (1, "2COMMIT", 2)


def test_where_a_step_has_fewer_the_next_one_is(events: EventLog, kills: Kills, room: Room) -> None:
    injector = Injector("iter2:#9", events, room.within, {})
    injector.before_action(FATAL, 2)
    assert not kills
    injector.before_action(FATAL, 3)
    assert len(kills) == 1


class Moments:
    """A stage's units, each with one moment."""

    def __init__(self, *units: str) -> None:
        self.tensors = {f"{unit}/weight/exp_avg": torch.ones(2) for unit in units}

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.tensors.items()

    @property
    def changed(self) -> list[str]:
        return [name for name, tensor in self.tensors.items() if tensor[0] != 1.0]


def test_a_bit_flips_in_a_replica_when_there_is_one(
    events: EventLog, room: Room, tmp_path: Path
) -> None:
    stages: Any = {0: Moments("embedding"), 1: Moments("layer1", "head")}
    held: list[int] = []
    verify = Action.parse("0VERIFY")
    text = "iter2:0VERIFY:flip:replica/exp_avg"
    injector = Injector(text, events, room.within, stages, replicas=lambda: held)
    injector.before_action(verify, 2)
    assert not read_events(tmp_path)
    held.append(1)
    for _ in range(2):
        injector.before_action(verify, 2)
    assert (stages[0].changed, stages[1].changed) == ([], ["layer1/weight/exp_avg"])
    (event,) = read_events(tmp_path)
    assert (event["how"], event["fault"]) == ("flip", text)


@pytest.mark.parametrize("text", ["change:2COMMIT", "change:#2"])
def test_a_fault_waits_for_the_step_in_which_state_moves(
    events: EventLog, kills: Kills, room: Room, tmp_path: Path, text: str
) -> None:
    moving_step = 0
    injector = Injector(text, events, room.within, {}, lambda: moving_step)
    for step in (1, 2):
        for action in (FATAL, COMMIT):
            injector.before_action(action, step)
    moving_step = 3
    injector.before_action(FATAL, 3)
    assert not kills
    injector.before_action(COMMIT, 3)
    (event,) = read_events(tmp_path)
    assert (len(kills), event["step"], event["fault"]) == (1, 3, text)


def test_a_worker_hangs_in_the_next_computation(
    events: EventLog, room: Room, monkeypatch: pytest.MonkeyPatch
) -> None:
    def sleep(seconds: float) -> None:
        raise HangOver

    monkeypatch.setattr(time, "sleep", sleep)
    injector = Injector("iter2:#1:hang", events, room.within, {})
    injector.before_action(COMMIT, 2)
    with pytest.raises(HangOver):
        injector.before_action(FATAL, 2)
    assert room.seen == [("2.0B3", 2)]


def test_a_moment_of_a_save_is_no_action(events: EventLog, kills: Kills) -> None:
    before = save_injector("iter2:SAVE_END", events)
    before(SaveMoment.RENAME, 2)
    before(SaveMoment.END, 1)
    assert not kills
    before(SaveMoment.END, 2)
    assert len(kills) == 1


def test_each_way_strikes_whom_it_names(kills: Kills) -> None:
    worker, agent = os.getpid(), os.getpgrp()
    for how in (How.KILL_WORKER, How.KILL_AGENT, How.STOP_WORKER, How.STOP_AGENT):
        strike(how)
    kill, stop = signal.SIGKILL, signal.SIGSTOP
    assert kills == [(worker, kill), (agent, kill), (worker, stop), (agent, stop)]
    with pytest.raises(InjectedError):
        strike(How.RAISE)


def test_a_worker_can_end_as_if_all_were_well() -> None:
    if (pid := os.fork()) == 0:
        strike(How.EXIT)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0


class Held:
    """A stage with one tensor."""

    def __init__(self) -> None:
        self.moment = torch.tensor([[1.0, 2.0]])

    def state(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield "layer1/layer.bias/exp_avg@4", self.moment


def test_a_bit_flips_once_and_the_node_lives_on(
    events: EventLog, kills: Kills, room: Room, tmp_path: Path
) -> None:
    held: Any = Held()
    injector = Injector("iter2:2COMMIT:flip:layer1/exp_avg", events, room.within, {2: held})
    injector.before_action(COMMIT, 1)
    assert held.moment.tolist() == [[1.0, 2.0]]
    for _ in range(2):
        injector.before_action(COMMIT, 2)
        assert held.moment.view(torch.int32).tolist() == [[0x3F800001, 0x40000000]]
    (event,) = read_events(tmp_path)
    assert (event["event"], event["how"], kills) == ("fault", "flip", [])


def test_what_is_not_there_cannot_flip(events: EventLog, room: Room) -> None:
    held: Any = Held()
    injector = Injector("iter2:2COMMIT:flip:layer1/exp_avg_sq", events, room.within, {2: held})
    with pytest.raises(TrainingError, match="this node has no layer1/exp_avg_sq then"):
        injector.before_action(COMMIT, 2)


def test_an_action_of_an_evaluation_is_fatal_there_alone(
    events: EventLog, kills: Kills, room: Room, tmp_path: Path
) -> None:
    forward = Action.parse("2.0F3")
    injector = Injector("iter4:EVAL2/2.0F3", events, room.within, {})
    injector.before_action(forward, 4)
    for action, batch, step in ((forward, 1, 4), (forward, 2, 2), (Action.parse("2.0F2"), 2, 4)):
        injector.before_evaluated(action, batch, step)
    assert not kills
    injector.before_evaluated(forward, 2, 4)
    (event,) = read_events(tmp_path)
    assert (len(kills), event["fault"], event["step"]) == (1, "iter4:EVAL2/2.0F3", 4)


def test_actions_of_an_evaluation_count_among_those_of_the_step_before(
    events: EventLog, kills: Kills, room: Room
) -> None:
    injector = Injector("iter4:#3", events, room.within, {})
    injector.before_action(FATAL, 4)
    injector.before_evaluated(Action.parse("2.0F3"), 1, 4)
    assert not kills
    injector.before_evaluated(Action.parse("2.0F3"), 1, 4)
    assert len(kills) == 1


def test_no_bit_flips_in_an_evaluation(events: EventLog, kills: Kills, room: Room) -> None:
    injector = Injector("iter4:#1:flip:layer1/parameter", events, room.within, {})
    injector.before_evaluated(Action.parse("2.0F3"), 1, 4)
    assert not kills
