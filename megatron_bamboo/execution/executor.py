"""Runs programs: a table from operation to method, and a short loop.

Between two actions the loop looks whether the plan has changed, and if so follows it: channels are
made anew where the lost node was in them, collective groups all, the program is replaced by what
remains, and the loop goes on. A failed wait is only a sign of a loss; the loop then waits for the
plan that says so. Megatron's ``forward_backward_func`` is the forward and backward part of a
program; the training step runs its tail.
"""

import contextlib
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_bamboo.config import Layout
from megatron_bamboo.data.replay import ReplayedIterator
from megatron_bamboo.execution.compute import Compute
from megatron_bamboo.execution.epochs import EpochWatch, StepProgress
from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded, PeerLost
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.execution.mirrors import Mirrors
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import (
    COMMIT_GROUP,
    GroupRegistry,
    all_neighbours,
    holder_group,
    memberships,
    stage_group,
)
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.tail import Tail
from megatron_bamboo.execution.transport import Expected, TensorShape, Transport
from megatron_bamboo.execution.turnstile import Turnstile
from megatron_bamboo.execution.whereabouts import Whereabouts
from megatron_bamboo.membership.place import SWITCH
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.planner.healing import stages_to_hold
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.schedule.actions import (
    COMPUTE_OPS,
    GATHER_OPS,
    RECEIVE_OPS,
    SEND_OPS,
    TAIL_OPS,
    Action,
    Op,
)
from megatron_bamboo.schedule.schedule import Program
from megatron_bamboo.schedule.takeover import Progress
from megatron_bamboo.script.providers import ForwardStepFunc

# Every survivor's progress is there when a plan is: it waits only where one has just been lost.
PREPARE_SECONDS = 1.0

# Where a worker can do nothing until another has done its part.
_AWAITED = RECEIVE_OPS | TAIL_OPS - {Op.STEP, Op.SEND_STATE}
# What ends the forward and backward part: not the state that moves, which is sent first, nor what
# the step before has left to gather.
_LAST_OPS = TAIL_OPS - GATHER_OPS - {Op.SEND_STATE}
_LOGGED_AS_DONE = COMPUTE_OPS | SEND_OPS
# Workers that share layers compute together, and sum what sequence parallelism has split.
_JOINT = COMPUTE_OPS | {Op.REDUCE}


@dataclass(frozen=True, slots=True)
class Shapes:
    """What messages look like."""

    activation: TensorShape
    tied: TensorShape | None
    refresh: dict[int, TensorShape]  # by stage held
    state: Callable[[int], TensorShape]  # of a stage held: all of its state, when it moves


@dataclass(frozen=True, slots=True)
class Parts:
    """What an executor is made of; wired in ``worker.py``."""

    worker: str
    layout: Layout
    compute: Compute
    tail: Tail
    mirrors: Mirrors
    transport: Transport
    registry: GroupRegistry
    ledger: CommitLedger
    events: EventLog
    hold: Callable[[Collection[int]], Shapes]  # hold exactly these stages
    before_action: Callable[[Action, int], None]  # fault injection
    turnstile: Turnstile | None  # where several workers share layers
    wait_seconds: float
    where: Whereabouts


class Executor:
    """One worker's way through its programs."""

    def __init__(self, parts: Parts, view: PipelineView, plan: Plan) -> None:
        self._parts = parts
        self._view = view
        self._plan = plan
        self._watch: EpochWatch | None = None
        self._state = StepState(step=0)
        self._stepped = 0  # the last step that was applied here
        self._queue: deque[Action] = deque()
        self._shapes: Shapes | None = None
        self._taken_over: dict[int, float] = {}  # by stage, when its loss was announced
        self._forward_step_func: ForwardStepFunc | None = None
        self._data: ReplayedIterator | None = None
        self._perform: dict[Op, Callable[[Action], None]] = {
            Op.F: self._forward,
            Op.RF: self._forward,
            Op.B: self._backward,
            Op.SEND_F: self._send_output,
            Op.SEND_B: self._send_gradient,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.SEND_MIRROR: self._send_mirror,
            Op.RECV_MIRROR: lambda a: None,  # its channel expects it since the step began
            Op.REDUCE: lambda a: parts.tail.reduce(a.stage, self._state),
            Op.SEND_TIE: lambda a: parts.tail.send_tie(a.stage, view.pipeline, self._state),
            Op.TIE: lambda a: parts.tail.tie(a.stage, view.pipeline, self._state, self._take),
            Op.SEND_REFRESH: self._send_refresh,
            Op.RECV_REFRESH: self._receive_refresh,
            Op.SEND_STATE: self._send_state,
            Op.RECV_STATE: self._receive_state,
            Op.COMMIT: self._commit,
            Op.STEP: self._step,
            Op.GATHER: self._gather,
            Op.RGATHER: self._gather,
        }

    def start(self, watch: EpochWatch, step: int = 0) -> None:
        """Open channels and make the groups of the first plan, after ``step`` steps.

        Where a node is lost meanwhile the rest is made when it is first used: another worker may
        be past this, and waits for what this one computes.
        """
        self._watch = watch
        self._state = StepState(step)
        self._stepped = step
        if self._view.sharded:
            self._parts.ledger.note_gathered(step)
        self._parts.ledger.follow(self._plan.epoch)
        self._join(self._plan)
        self._hold(self._plan)
        try:
            for stage in self._view.in_force.stages_of(self._view.rank):
                self._parts.registry.get(stage_group(stage))
            self._parts.registry.get(COMMIT_GROUP)
            for gather in self._view.gathers():
                self._parts.registry.get(holder_group(gather.stage))
        except PeerLost as lost:
            self._await_plan("start", lost)

    @property
    def plan(self) -> Plan:
        """The plan in force."""
        return self._plan

    def has_pending_plan(self) -> bool:
        """Whether a plan waits to be acted upon."""
        assert self._watch is not None, "start() comes first"
        return self._watch.has_pending()

    def follow_plans(self) -> Plan:
        """Act upon the plans that wait; the plan then in force.

        Between two steps a gather that another worker has not completed is run again: that one may
        be who is to say what this worker waits for.
        """
        self._follow()
        if not self._is_in_step():
            self._queue = deque(self._open_gathers())
            self._execute(until_tail=False)
        return self._plan

    def prepare(self, plan: Plan) -> None:
        """Do what a plan asks for and can be done while the main thread computes.

        Called from the control thread. The channels that are new are opened, and what remains of
        the step is worked out; if that cannot be done yet, the main thread does it.
        """
        parts, view = self._parts, self._view
        groups = self._memberships(plan)
        parts.registry.add_pairs(plan.epoch, groups)
        parts.transport.connect(all_neighbours(plan, parts.worker, view.num_chunks, view.tied))
        if victims := view.victims(plan):
            with contextlib.suppress(DeadlineExceeded):
                published = self._published_progress(plan, PREPARE_SECONDS)
                view.prepare(victims, published, self._state.step)

    def progress(self) -> StepProgress:
        """How far this worker has come, for others to rely on; called from the control thread."""
        state = self._state
        received = self._parts.transport.mailbox.arrived(state.step)
        done = frozenset(tuple(state.done))
        return StepProgress(
            state.step, Progress(done, frozenset(a for a in received if a.op in RECEIVE_OPS))
        )

    def begin_step(self, step: int, data: Iterator[Any], forward_step: ForwardStepFunc) -> None:
        """Make the program of a step the one to run."""
        plan = self.follow_plans()
        if plan.change is not None and step > plan.change.step:
            self._make_change()
        self._state = StepState(step)
        self._data = ReplayedIterator(data)
        self._forward_step_func = forward_step
        self._parts.compute.start_step()
        self._queue = deque(self._view.begin_step(step))
        self._expect()

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
            raise ValueError("forward_only and collect_non_loss_data are not supported yet")
        if num_microbatches != self._parts.layout.num_microbatches:
            raise ValueError(
                f"this schedule has {self._parts.layout.num_microbatches} microbatches, "
                f"not {num_microbatches}"
            )
        self.begin_step(self._state.step + 1, _first_of(data_iterator), forward_step_func)
        self._execute(until_tail=True)
        reports = self._state.reports if self._view.runs_last_stage() else {}
        return [reports[microbatch] for microbatch in sorted(reports)]

    def finish_step(self) -> tuple[float, ...]:
        """Run what is left of the step, its tail above all; the commit vector."""
        self._execute(until_tail=False)
        vector = self._parts.ledger.passed_vector(self._state.step)
        assert vector is not None
        return vector

    # The loop.

    def _follow(self) -> None:
        watch = self._watch
        assert watch is not None, "start() comes first"
        while watch.has_pending():
            with self._parts.where.at(self._state.step, SWITCH):
                self._switch(watch.take_pending())

    def _execute(self, until_tail: bool) -> None:
        while self._queue:
            self._follow()
            action = self._queue[0]
            if until_tail and action.op in _LAST_OPS:
                return
            self._parts.before_action(action, self._step_of(action))
            start = time.monotonic()
            try:
                self._meet(action)
                with self._at(action):
                    self._perform[action.op](action)
            except EpochEnded:
                continue
            except PeerLost as lost:
                self._await_plan(action, lost)
                continue
            self._queue.popleft()
            if action.op in _LOGGED_AS_DONE:
                self._state.done.append(action)
            self._log(action, start)

    def _step_of(self, action: Action) -> int:
        """The step that an action belongs to; a gather may be run again in the one after."""
        return self._stepped if action.op in GATHER_OPS else self._state.step

    def _at(self, action: Action) -> AbstractContextManager[None]:
        """Say where this worker is, and for whom it waits there."""
        waits_for, kind = "", None
        if action.op in _AWAITED:
            sender = self._view.sender_of(action)
            waits_for = sender if sender != self._parts.worker else "the others"
        else:
            kind = (action.op, action.stage, action.chunk)
        return self._parts.where.at(self._step_of(action), str(action), waits_for, kind)

    def _meet(self, action: Action) -> None:
        """Where workers share layers, enter the actions in which they meet together or not."""
        turnstile, watch = self._parts.turnstile, self._watch
        if turnstile is None or action.op not in _JOINT:
            return
        assert watch is not None
        what = f"{action} of step {self._state.step} in epoch {self._plan.epoch}"
        with self._parts.where.at(self._state.step, str(action), "the other workers of its node"):
            turnstile.pass_together(what, watch.has_pending)

    def _await_plan(self, action: Action | str, lost: PeerLost) -> None:
        assert self._watch is not None
        step = self._step_of(action) if isinstance(action, Action) else self._state.step
        why = f"{action} of step {step}: {lost}"
        self._parts.events.emit("peer_lost", why=why, epoch=self._plan.epoch)
        with self._parts.where.at(step, str(action), "the next plan"):
            self._watch.wait_for_plan(self._parts.wait_seconds, why)

    def _switch(self, plan: Plan) -> None:
        """Act by a new plan: what remains of this step, and all steps after it."""
        start = time.monotonic()
        parts, state, before = self._parts, self._state, self._plan
        parts.ledger.follow(plan.epoch)
        if before.change is not None and before.change.is_made(plan.decision):
            self._make_change()
            before = self._plan
        victims = self._view.victims(plan)
        published = self._published_progress(plan, parts.wait_seconds) if victims else {}
        state.done[:] = self._view.follow(victims, published, state.step, state.done)
        self._plan = plan
        self._join(plan)
        if plan.decision is not None and parts.ledger.gathered > plan.decision.gathered:
            parts.ledger.note_gathered(plan.decision.gathered)
        assert self._view.in_force.placement == self._view.pipeline.placement()
        self._hold(plan)
        if self._queue:
            self._queue = deque(self._remaining(hit=bool(victims)))
            # Once it is passed nothing more is summed or sent in a step.
            if self._is_in_step() and not self._is_passed():
                self._adopt_mirrors()
                self._expect()
        self._log_takeover(before, plan, start)

    def _adopt_mirrors(self) -> None:
        """Go on from the victim's gradients that are here."""
        step, parts = self._state.step, self._parts
        for mirror in self._view.adopted:
            tensor = self._take(Message(step, mirror), "its sender")
            parts.mirrors.adopt(mirror, tensor, self._state)
            parts.events.emit(
                "mirror",
                stage=mirror.stage,
                chunk=mirror.chunk,
                microbatch=mirror.microbatch,
                pipeline=self._view.number,
                step=step,
                epoch=self._plan.epoch,
            )

    def _remaining(self, hit: bool) -> Iterator[Action]:
        """What is left of the step under the new plan, and of the gather of the one before."""
        yield from self._open_gathers()
        if not self._is_in_step():
            return
        if self._is_passed():
            after = self._view.tail(self._state.step)
            yield from (a for a in after if a.op is Op.STEP or a.op in GATHER_OPS)
            return
        step = self._state.step
        compute = self._view.remaining(self._state.done) if hit else self._queue
        yield from self._view.state_sends(step)
        yield from (action for action in compute if action.op not in TAIL_OPS)
        yield from self._view.tail(step)

    def _open_gathers(self) -> Program:
        """The gather of the last step, where somebody has not completed it."""
        if self._parts.ledger.gathered == self._stepped:
            return ()
        return self._view.gathers()

    def _is_in_step(self) -> bool:
        """Whether the step's program is under way, and not all of it behind this worker."""
        return self._stepped < self._state.step

    def _is_passed(self) -> bool:
        return self._parts.ledger.passed_vector(self._state.step) is not None

    def _published_progress(self, plan: Plan, seconds: float) -> dict[int, StepProgress]:
        """By rank, what the survivors of this pipeline published when the epoch ended."""
        assert self._watch is not None
        published = {}
        for rank in self._view.survivors(plan):
            node = self._view.pipeline.ranks[rank]
            progress = self._watch.progress_of(plan.epoch - 1, node, seconds)
            if progress is not None:
                published[rank] = progress
        return published

    def _make_change(self) -> None:
        """The step in which state moved is applied: act by what was planned for the next."""
        self._plan = self._plan.made()
        self._view.make_change(self._plan)
        self._join(self._plan, is_changed=True)
        self._hold(self._plan)

    def _hold(self, plan: Plan) -> None:
        """Hold the stages that are this worker's under a plan, and those that it will have."""
        worker, number = self._parts.worker, self._view.number
        stages = set(stages_to_hold(plan.pipelines[number], worker))
        if plan.change is not None:
            stages.update(stages_to_hold(plan.change.pipelines[number], worker))
        self._shapes = self._parts.hold(stages)

    def _join(self, plan: Plan, is_changed: bool = False) -> None:
        parts, view = self._parts, self._view
        parts.registry.update(plan.epoch, self._memberships(plan), is_changed)
        view.set_plan(plan)
        parts.transport.connect(all_neighbours(plan, parts.worker, view.num_chunks, view.tied))

    def _memberships(self, plan: Plan) -> dict[str, tuple[str, ...]]:
        parts, view = self._parts, self._view
        size = parts.layout.tensor_size
        return memberships(plan, parts.worker, view.num_chunks, view.tied, size, view.sharded)

    # The actions.

    def _forward(self, action: Action) -> None:
        assert self._forward_step_func is not None and self._data is not None
        self._parts.compute.forward(
            action, self._view.in_force, self._state, self._forward_step_func, self._data
        )

    def _backward(self, action: Action) -> None:
        self._parts.compute.backward(action, self._view.in_force, self._state)

    def _send_output(self, action: Action) -> None:
        self._send(action, self._state.outputs[action.with_op(Op.F)])

    def _send_gradient(self, action: Action) -> None:
        self._send(action, self._state.input_gradients[action.with_op(Op.B)])

    def _send(self, action: Action, tensor: Tensor) -> None:
        receive = self._view.in_force.receive_of(action)
        peer = self._view.pipeline.stages[receive.stage]
        self._parts.transport.send(peer, Message(self._state.step, receive), tensor)

    def _send_mirror(self, action: Action) -> None:
        peer = self._view.pipeline.replicas[action.stage]
        assert peer is not None
        message = Message(self._state.step, self._view.in_force.receive_of(action))
        self._parts.transport.send(peer, message, self._parts.mirrors.copy(action, self._state))

    def _receive(self, action: Action) -> None:
        sender = self._view.sender_of(action)
        self._take(Message(self._state.step, action), sender)

    def _send_refresh(self, action: Action) -> None:
        for peer in self._view.refreshed(action.stage, self._state.step):
            self._parts.tail.send_refresh(action.stage, peer, self._state)

    def _receive_refresh(self, action: Action) -> None:
        peer = self._view.pipeline.stages[action.stage]
        # So that no mirror of this step is under way in the next one.
        for mirror in self._view.last_mirrors(action.stage):
            self._take(Message(self._state.step, mirror), peer)
        self._parts.tail.receive_refresh(action.stage, peer, self._state, self._take)

    def _send_state(self, action: Action) -> None:
        step, ranks = self._state.step, self._view.pipeline.ranks
        for move in self._view.moves(step):
            if move.stage == action.stage:
                self._parts.tail.send_state(action.stage, ranks[move.target], self._state)

    def _receive_state(self, action: Action) -> None:
        peer = self._view.pipeline.stages[action.stage]
        self._parts.tail.receive_state(action.stage, peer, self._state, self._take)

    def _commit(self, action: Action) -> None:
        self._parts.tail.commit(self._view.pipeline, self._state)

    def _step(self, action: Action) -> None:
        state, parts = self._state, self._parts
        parts.tail.step(state)
        parts.transport.finish_step(state.step)
        # Only the step's number and progress are still asked for.
        self._state = StepState(state.step)
        self._stepped = state.step

    def _gather(self, action: Action) -> None:
        self._parts.tail.gather(action.stage)
        if len(self._queue) == 1 or self._queue[1].op not in GATHER_OPS:
            self._parts.ledger.note_gathered(self._stepped)

    def _take(self, message: Message, sender: str) -> Tensor:
        assert self._watch is not None
        return self._parts.transport.mailbox.take(
            message, self._parts.wait_seconds, self._watch.has_pending, sender
        )

    def _expect(self) -> None:
        """Let the channels receive what the program waits for, in its order."""
        step = self._state.step
        self._parts.transport.expect(
            Expected(Message(step, action), sender, self._shape_of(action))
            for action, sender in self._view.awaited(step)
        )

    def _shape_of(self, action: Action) -> TensorShape:
        shapes = self._shapes
        assert shapes is not None, "start() comes first"
        if action.op is Op.RECV_MIRROR:
            return self._parts.mirrors.shape(action)
        if action.op is Op.RECV_REFRESH:
            return shapes.refresh[action.stage]
        if action.op is Op.RECV_STATE:
            return shapes.state(action.stage)
        if action.op is Op.TIE:
            assert shapes.tied is not None
            return shapes.tied
        return shapes.activation

    def _log(self, action: Action, start: float) -> None:
        if action.op in (Op.F, Op.B) and action.stage in self._taken_over:
            self._log_pause(action, start)
        self._parts.events.emit(
            "action",
            action=str(action),
            step=self._step_of(action),
            epoch=self._plan.epoch,
            start=start,
            end=time.monotonic(),
            pipeline=self._view.number,
            rank=self._view.rank,
        )

    def _log_pause(self, action: Action, start: float) -> None:
        """A victim's stage is computed again, so long after its loss was announced."""
        seconds = start - self._taken_over.pop(action.stage)
        self._parts.events.emit(
            "pause",
            stage=action.stage,
            pipeline=self._view.number,
            step=self._state.step,
            epoch=self._plan.epoch,
            seconds=seconds,
        )

    def _log_takeover(self, before: Plan, plan: Plan, start: float) -> None:
        events, number, step = self._parts.events, self._view.number, self._state.step
        seconds = time.monotonic() - start
        events.emit("epoch", epoch=plan.epoch, step=step, lost=plan.lost, seconds=seconds)
        stages = zip(before.pipelines[number].stages, self._view.pipeline.stages, strict=True)
        for stage, (victim, shadow) in enumerate(stages):
            if victim != shadow == self._parts.worker:
                assert self._watch is not None
                self._taken_over[stage] = self._watch.ended_at
                events.emit(
                    "takeover",
                    stage=stage,
                    pipeline=number,
                    step=step,
                    epoch=plan.epoch,
                    victim=victim,
                    shadow=shadow,
                    in_step=bool(self._queue) and self._is_in_step(),
                )


def _first_of(data_iterator: Any) -> Iterator[Any]:
    """The step's microbatches; Megatron's list has an iterator a chunk, all over the same ones."""
    return iter(data_iterator[0] if isinstance(data_iterator, list) else data_iterator)
