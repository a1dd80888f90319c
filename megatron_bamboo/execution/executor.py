"""Runs programs: a short loop over actions, and Megatron's call for a step.

Between two actions the loop looks whether the plan has changed, and if so follows it
(``follower.py``). A failed wait is only a sign of a loss; the loop then waits for the plan that
says so. What an action does is in ``performer.py``. Megatron's ``forward_backward_func`` is the
forward and backward part of a program; the training step runs its tail.
"""

import time
from collections import deque
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from itertools import chain
from typing import Any

from megatron_bamboo.execution.course import Course
from megatron_bamboo.execution.epochs import EpochWatch, StepProgress
from megatron_bamboo.execution.errors import EpochEnded, PeerLost
from megatron_bamboo.execution.follower import PlanFollower
from megatron_bamboo.execution.parts import Parts
from megatron_bamboo.execution.performer import Performer
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import COMMIT_GROUP, holder_group, primary_group
from megatron_bamboo.membership.place import SWITCH
from megatron_bamboo.membership.waits import Waiting
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.schedule.actions import (
    COMPUTE_OPS,
    GATHER_OPS,
    MEND_OPS,
    RECEIVE_OPS,
    SEND_OPS,
    STATE_SENDS,
    TAIL_OPS,
    Action,
    Op,
)
from megatron_bamboo.schedule.takeover import Progress
from megatron_bamboo.script.providers import ForwardStepFunc

# Where a worker can do nothing until another has done its part.
_AWAITED = RECEIVE_OPS | TAIL_OPS - STATE_SENDS - {Op.VERIFY, Op.STEP}
# What ends the forward and backward part: not the state that moves, which is sent first and may be
# needed first, nor what the step before has left to gather.
_LAST_OPS = TAIL_OPS - GATHER_OPS - STATE_SENDS - {Op.RECV_STATE}
_LOGGED_AS_DONE = COMPUTE_OPS | SEND_OPS
# Workers that share layers compute together, and sum what sequence parallelism has split.
_JOINT = COMPUTE_OPS | {Op.REDUCE}


class Executor:
    """One worker's way through its programs."""

    def __init__(self, parts: Parts, view: PipelineView, plan: Plan) -> None:
        self._parts = parts
        self._view = view
        self._course = Course(plan, parts.ledger)
        self._performer = Performer(parts, view, self._course)
        self._follower = PlanFollower(parts, view, self._course, self._performer)

    def start(self, watch: EpochWatch, step: int = 0) -> None:
        """Open channels and make the groups of the first plan, after ``step`` steps.

        Where a node is lost meanwhile the rest is made when it is first used: another worker may
        be past this, and waits for what this one computes. So are all groups of a pipeline that
        begins among others, or begins its step anew with them: they come in the order of theirs.
        """
        self._course.begin(watch, step)
        self._parts.ledger.follow(self.plan.epoch)
        self._follower.enter(self.plan)
        self._follower.hold(self.plan)
        is_late = self._view.pipeline.begins or self._view.number in self.plan.redoing
        for action in () if is_late else self._view.collectives():
            waiting = self._waiting_for(self._members_of(action))
            try:
                with self._parts.where.at(step, str(action), "the others", waiting=waiting):
                    for name in self._groups_of(action):
                        self._parts.registry.get(name)
            except PeerLost as lost:
                self.await_plan(str(action), step, lost)
                return

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._course.plan

    @property
    def step(self) -> int:
        """The step under way, or the last one."""
        return self._course.state.step

    def has_pending_plan(self) -> bool:
        """Whether a plan waits to be acted upon."""
        return self._course.epochs.has_pending()

    def follow_plans(self) -> Plan:
        """Act upon the plans that wait; the plan then in force.

        Between two steps a gather that another worker has not completed is run again: that one may
        be who is to say what this worker waits for.
        """
        self._follow()
        if not self._course.is_in_step:
            self._course.queue = deque(self._follower.open_gathers())
            self._execute(until_tail=False)
        return self.plan

    def prepare(self, plan: Plan) -> None:
        """Get ready for a plan that is soon to be followed; called from the control thread."""
        self._follower.prepare(plan)

    def progress(self) -> StepProgress:
        """How far this worker has come, for others to rely on; called from the control thread."""
        state = self._course.state
        received = self._parts.transport.mailbox.arrived(state.step)
        done = frozenset(tuple(state.done))
        made = Progress(done, frozenset(a for a in received if a.op in RECEIVE_OPS))
        return StepProgress(state.step, made, state.attempt)

    def begin_step(self, step: int, data: Iterable[Any], forward_step: ForwardStepFunc) -> None:
        """Make the program of a step the one to run."""
        self.follow_plans()
        self._course.begin_step(step, self._view.begin_step(step), self._view.attempt(step))
        arrangement, number = self._view.arrangement, self._view.number
        self._parts.compute.start_step(data, forward_step, arrangement, number)
        self._performer.expect()
        # Not between two steps, where a save would fork what is under way.
        self._parts.registry.form_collectives()

    def forward_backward_func(
        self,
        *,
        forward_step_func: ForwardStepFunc,
        data_iterator: Any,
        model: Any,
        num_microbatches: int,
        seq_length: int,
        micro_batch_size: int,
        decoder_seq_length: int | None = None,
        forward_only: bool = False,
        collect_non_loss_data: bool = False,
        **_other: Any,
    ) -> list[Any]:
        """Megatron-core's signature: one step's forward and backward passes.

        Returns what the loss function reported, by microbatch, where the last stage runs (but for
        what a lost node had run and its mirror spared); an empty list elsewhere. The step is the
        one after the last one finished. Sizes and groups are those that the executor was made with;
        arguments about Megatron's own groups mean nothing.

        Raises:
            ValueError: for a call that this executor was not built for.
        """
        if forward_only or collect_non_loss_data:
            raise ValueError(
                "a step has backward passes, and its losses are all that comes of it: leave "
                "forward_only and collect_non_loss_data out, evaluations come by --eval-interval"
            )
        if num_microbatches != (due := self._view.shape.num_microbatches):
            raise ValueError(f"this schedule has {due} microbatches, not {num_microbatches}")
        self.begin_step(self._course.state.step + 1, _first_of(data_iterator), forward_step_func)
        self._execute(until_tail=True)
        reports = self._course.state.reports if self._view.runs_last_stage() else {}
        return [reports[microbatch] for microbatch in sorted(reports)]

    def finish_step(self) -> tuple[float, ...]:
        """Run what is left of the step, its tail above all; the commit vector."""
        self._execute(until_tail=False)
        vector = self._parts.ledger.passed_vector(self._course.state.step)
        assert vector is not None
        return vector

    def await_plan(self, action: str, step: int, lost: PeerLost) -> None:
        """A wait has failed, which is a sign of a loss: wait for the plan that says so.

        Raises:
            DeadlineExceeded: none came.
        """
        why = f"{action} of step {step}: {lost}"
        self._parts.events.emit("peer_lost", why=why, epoch=self.plan.epoch)
        waiting = self._waiting_for(lost.peers)
        with self._parts.where.at(step, action, "the next plan", waiting=waiting):
            self._course.epochs.wait_for_plan(self._parts.wait_seconds, why)

    def _follow(self) -> None:
        watch = self._course.epochs
        while watch.has_pending():
            with self._parts.where.at(self._course.state.step, SWITCH):
                self._follower.switch(watch.take_pending())

    def _execute(self, until_tail: bool) -> None:
        while self._course.queue:
            self._follow()
            action = self._course.queue[0]
            if until_tail and action.op in _LAST_OPS:
                return
            self._parts.before_action(action, self._course.step_of(action))
            start = time.monotonic()
            try:
                self._meet(action)
                with self._at(action):
                    self._performer.perform(action)
            except EpochEnded:
                continue
            except PeerLost as lost:
                self.await_plan(str(action), self._course.step_of(action), lost)
                continue
            self._course.queue.popleft()
            if action.op in _LOGGED_AS_DONE:
                self._course.state.done.append(action)
            self._log(action, start)
            if self._parts.account is not None:
                self._parts.account.look(action, self._view.pipeline, self._course.state)
            if action.op is Op.STEP:
                self._follower.go_on_after(self._course.stepped)

    def _at(self, action: Action) -> AbstractContextManager[None]:
        """Say where this worker is, and for whom it waits there."""
        step, kind = self._course.step_of(action), (action.op, action.stage, action.chunk)
        if action.op not in _AWAITED:
            return self._parts.where.at(step, str(action), kind=kind)
        sender = self._view.sender_of(action)
        waits_for = sender if sender != self._parts.worker else "the others"
        waiting = self._waiting_for(self._members_of(action))
        kind_of_wait = None if waiting is None else kind
        return self._parts.where.at(step, str(action), waits_for, kind_of_wait, waiting)

    def _members_of(self, action: Action) -> tuple[str, ...]:
        """Those without whom an action cannot be completed."""
        if action.op in MEND_OPS:
            return self._parts.verification.members(action.stage, self.plan)
        if names := self._groups_of(action):
            members = map(self._parts.registry.members, names)
            return tuple(dict.fromkeys(chain.from_iterable(members)))
        return (self._view.sender_of(action),)

    def _groups_of(self, action: Action) -> tuple[str, ...]:
        """The groups in which an action is done together with others, in the order of use; none
        where the plan knows of none."""
        match action.op:
            case Op.COMMIT:
                return (COMMIT_GROUP,)
            case Op.REDUCE:
                name_of = primary_group
            case Op.GATHER | Op.RGATHER:
                name_of = holder_group
            case _:
                return ()
        number, places = self._view.number, self._view.arrangement.places()
        return tuple(name_of(stages) for stages in places if stages[number] == action.stage)

    def _waiting_for(self, members: Sequence[str]) -> Waiting | None:
        others = tuple(member for member in members if member != self._parts.worker)
        return Waiting(others, self._parts.transport.sent()) if others else None

    def _meet(self, action: Action) -> None:
        """Where workers share layers, enter the actions in which they meet together or not."""
        turnstile, watch = self._parts.turnstile, self._course.epochs
        if turnstile is None or action.op not in _JOINT:
            return
        step, others = self._course.state.step, "the other workers of its node"
        what = f"{action} of step {step} in epoch {self.plan.epoch}"
        with self._parts.where.at(step, str(action), others):
            turnstile.pass_together(what, watch.has_pending)

    def _log(self, action: Action, start: float) -> None:
        if action.op in (Op.F, Op.B) and action.stage in self._course.taken_over:
            self._log_pause(action, start)
        self._parts.events.emit(
            "action",
            action=str(action),
            step=self._course.step_of(action),
            epoch=self.plan.epoch,
            start=start,
            end=time.monotonic(),
            pipeline=self._view.number,
            rank=self._view.rank,
        )

    def _log_pause(self, action: Action, start: float) -> None:
        """A victim's stage is computed again, so long after its loss was announced."""
        seconds = start - self._course.taken_over.pop(action.stage)
        self._parts.events.emit(
            "pause",
            stage=action.stage,
            pipeline=self._view.number,
            step=self._course.state.step,
            epoch=self.plan.epoch,
            seconds=seconds,
        )


def _first_of(data_iterator: Any) -> Iterable[Any]:
    """The step's microbatches; Megatron's list has an iterator a chunk, all over the same ones."""
    first: Iterable[Any] = data_iterator[0] if isinstance(data_iterator, list) else data_iterator
    return first
