"""Lets a fault strike this worker at its exact moment."""

import os
import signal
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import AbstractContextManager

import torch

from megatron_bamboo.checkpoint.moments import BeforeMoment, SaveMoment
from megatron_bamboo.execution.errors import TrainingError
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.rehearsal.fault import REPLICA, EvaluationMoment, Fault, How, Nth
from megatron_bamboo.rehearsal.networks import cut_off
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action

BeWithin = Callable[[Action, int], AbstractContextManager[None]]
_A_LONG_TIME = 3600.0


class InjectedError(RuntimeError):
    """What an injected fault raises."""


class Injector:
    """Strikes this worker when its moment has come.

    Args:
        text: the fault, like ``iter7:2.0B3``; empty for none.
        within: says to the agent that this worker is in an action.
        stages: what this worker holds.
        moving_step: the newest step in which state moves, by the plans followed here; 0 for none.
        replicas: the stages of which this worker holds a replica.
    """

    def __init__(
        self,
        text: str,
        events: EventLog,
        within: BeWithin,
        stages: Mapping[int, Stage],
        moving_step: Callable[[], int] = lambda: 0,
        replicas: Callable[[], Collection[int]] = tuple,
    ) -> None:
        self._fault = Fault.parse(text) if text else None
        self._events = events
        self._within = within
        self._stages = stages
        self._moving_step = moving_step
        self._replicas = replicas
        self._begun = 0

    @property
    def left(self) -> str:
        """The fault that has not struck yet; empty for none."""
        return "" if self._fault is None else str(self._fault)

    def before_action(self, action: Action, step: int) -> None:
        """An action of a step is about to begin."""
        fault = self._fault
        if fault is None:
            return
        due_step = self._moving_step() if fault.step is None else fault.step
        if isinstance(fault.moment, Nth):
            self._begun += step == due_step
            is_due = 0 < due_step < step or self._begun >= fault.moment.number
        else:
            is_due = (action, step) == (fault.moment, due_step)
        if is_due and self._can_strike(fault, action):
            self._strike(fault, action, step)

    def before_evaluated(self, action: Action, batch: int, step: int) -> None:
        """An action of the evaluation after a step is about to begin, in a global batch of it."""
        fault = self._fault
        if fault is None or fault.step != step or fault.how is How.FLIP:
            return
        if isinstance(fault.moment, Nth):
            self._begun += 1
            is_due = self._begun >= fault.moment.number
        else:
            is_due = fault.moment == EvaluationMoment(batch, action)
        if is_due and self._can_strike(fault, action):
            self._strike(fault, action, step)

    def before_moment(self, moment: SaveMoment, step: int) -> None:
        """A moment of a step's save has come."""
        if self._fault is not None and (moment, step) == (self._fault.moment, self._fault.step):
            self._strike(self._fault, moment, step)

    def _can_strike(self, fault: Fault, action: Action) -> bool:
        if fault.hits_replica:
            return bool(self._replicas())
        return fault.how is not How.HANG or action.op in COMPUTE_OPS

    def _strike(self, fault: Fault, moment: Action | SaveMoment, step: int) -> None:
        self._fault = None
        self._events.emit(
            "fault",
            fault=str(fault),
            how=fault.how,
            action=str(moment),
            step=step,
            group=os.getpgrp(),
        )
        if fault.how is How.HANG:
            assert isinstance(moment, Action)
            self._hang(moment, step)
        if fault.how is How.FLIP:
            self._flip_a_bit(fault)
        elif fault.how is How.RAISE and isinstance(moment, Action):
            with self._within(moment, step):
                strike(fault.how)
        else:
            strike(fault.how)

    def _flip_a_bit(self, fault: Fault) -> None:
        """Flip the lowest bit of the first byte of the first such tensor, wherever it is held."""
        hit = sorted(self._replicas()) if fault.hits_replica else list(self._stages)
        for name, tensor in (state for number in hit for state in self._stages[number].state()):
            unit, *_, kind = name.split("/")
            unit = REPLICA if fault.hits_replica else unit
            if f"{unit}/{kind.partition('@')[0]}" == fault.what:
                tensor.view(-1)[:1].view(torch.uint8)[0] ^= 1
                return
        raise TrainingError(f"--inject {fault}: this node has no {fault.what} then")

    def _hang(self, action: Action, step: int) -> None:
        with self._within(action, step):
            while True:
                time.sleep(_A_LONG_TIME)


def save_injector(text: str, events: EventLog) -> BeforeMoment:
    """What the process that writes a save calls before each of its moments."""

    def nowhere(action: Action, step: int) -> AbstractContextManager[None]:
        raise AssertionError(f"a save does not come to {action} of step {step}")

    return Injector(text, events, nowhere, {}).before_moment


def strike(how: How) -> None:
    """Strike this process or its node; nothing is flushed, closed or said to anyone."""
    match how:
        case How.KILL:
            os.killpg(os.getpgrp(), signal.SIGKILL)
        case How.KILL_WORKER:
            os.kill(os.getpid(), signal.SIGKILL)
        case How.KILL_AGENT:  # who leads the process group
            os.kill(os.getpgrp(), signal.SIGKILL)
        case How.STOP:
            os.killpg(os.getpgrp(), signal.SIGSTOP)
        case How.STOP_WORKER:
            os.kill(os.getpid(), signal.SIGSTOP)
        case How.STOP_AGENT:
            os.kill(os.getpgrp(), signal.SIGSTOP)
        case How.CUT:
            cut_off()
        case How.RAISE:
            raise InjectedError("a fault on purpose")
        case How.EXIT:
            os._exit(0)
        case How.HANG | How.FLIP:
            raise AssertionError(f"{how} needs more than a process")
