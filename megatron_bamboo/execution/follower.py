"""Acts upon plans: what changes in one worker when who holds and runs what changes.

Channels are made anew where the lost node was in them, collective groups all; the program is
replaced by what remains of it under the new plan, and the loop over actions goes on.
"""

import contextlib
import time
from collections import deque
from collections.abc import Iterator

from megatron_bamboo.execution.course import Course
from megatron_bamboo.execution.epochs import StepProgress
from megatron_bamboo.execution.errors import DeadlineExceeded, LetGo
from megatron_bamboo.execution.held_stages import Holding
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.execution.parts import Parts
from megatron_bamboo.execution.performer import Performer
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.registry import all_neighbours, memberships
from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.membership.restores import GoBack
from megatron_bamboo.planner.healing import stages_to_hold
from megatron_bamboo.planner.plan import PipelinePlan, Plan
from megatron_bamboo.schedule.actions import GATHER_OPS, TAIL_OPS, Action, Op
from megatron_bamboo.schedule.schedule import Program

# Every survivor's progress is there when a plan is: it waits only where one has just been lost.
PREPARE_SECONDS = 1.0


class PlanFollower:
    """Changes one worker's course when a plan asks for it."""

    def __init__(
        self, parts: Parts, view: PipelineView, course: Course, performer: Performer
    ) -> None:
        self._parts = parts
        self._view = view
        self._course = course
        self._performer = performer

    def prepare(self, plan: Plan) -> None:
        """Do what a plan asks for and can be done while the main thread computes.

        Called from the control thread. The channels that are new are opened, and what remains of
        the step is worked out; if that cannot be done yet, the main thread does it.
        """
        parts, view = self._parts, self._view
        # Where it was let go nothing is; where a step is begun anew, what it has is left first.
        if parts.worker not in plan.nodes or plan.redone is not None or plan.restored is not None:
            return
        groups = self._memberships(plan)
        parts.registry.add_pairs(plan.epoch, groups)
        parts.transport.connect(all_neighbours(plan, parts.worker, view.tied))
        # In the step of a new cut it is not sure yet which one the plan is about.
        is_sure = self._course.state.step > view.recut_step
        if is_sure and (victims := view.victims(plan)):
            with contextlib.suppress(DeadlineExceeded):
                published = self._published_progress(plan, PREPARE_SECONDS)
                view.prepare(victims, published, self._course.state.step)

    def switch(self, plan: Plan) -> None:
        """Act by a new plan: what remains of this step, and all steps after it.

        Raises:
            LetGo: this node is in no place of it.
            GoBack: all begin again.
        """
        start = time.monotonic()
        parts, view, course = self._parts, self._view, self._course
        parts.ledger.follow(plan.epoch)
        if parts.worker not in plan.nodes:
            raise LetGo
        if plan.restored is not None:
            raise GoBack(plan)
        change, state = course.plan.change, course.state
        if change is not None and change.is_made(plan.decision):
            self._make_change()
            state.done.clear()  # the step is passed
        # Nothing more comes from them, nor do they take anything.
        parts.registry.forget(plan.dismissed)
        parts.transport.drop(plan.dismissed)
        before = course.plan
        if plan.redone is not None:
            self._renew_channels(plan)
        if view.number in plan.redoing:
            self._begin_again(plan)
        else:
            self._go_on(plan)
        self._log_takeover(before, plan, start)

    def _go_on(self, plan: Plan) -> None:
        """What was done stays done."""
        parts, view, course = self._parts, self._view, self._course
        state, victims = course.state, view.victims(plan)
        published = self._published_progress(plan, parts.wait_seconds) if victims else {}
        state.done[:] = view.follow(victims, published, state.step, state.done)
        course.plan = plan
        self.enter(plan)
        self._gather_again(plan.decision)
        assert view.in_force.placement == view.pipeline.placement()
        self.hold(plan)
        if course.queue:
            course.queue = deque(self._remaining(hit=bool(victims)))
            # Once it is passed nothing more is summed or sent in a step.
            if course.is_in_step and not course.is_passed:
                self._adopt_mirrors()
                self._performer.expect()

    def _renew_channels(self, plan: Plan) -> None:
        """Leave all channels in which something of the step that is begun anew may be under way: it
        must not be mistaken for what comes now."""
        parts, view = self._parts, self._view
        redoing = {w for n in plan.redoing for w in plan.pipelines[n].ranks}
        peers = parts.registry.renew_pairs(plan.epoch, redoing)
        parts.transport.renew(peers, forgets_step=view.number in plan.redoing)
        self._course.state.send_again_to(redoing)

    def _begin_again(self, plan: Plan) -> None:
        """The step that is open is begun anew, with other microbatches or other nodes."""
        parts, view, course = self._parts, self._view, self._course
        view.begin_again(plan)
        course.plan = plan
        self.enter(plan)
        self._gather_again(plan.decision)
        self.hold(plan)
        if course.is_in_step and not course.is_passed:
            step = course.state.step
            assert step == plan.redone, f"step {step} is open, and {plan.redone} begun anew"
            program = (*self.open_gathers(), *view.begin_step(step))
            course.begin_step(step, program, view.attempt(step))
            parts.compute.start_again(view.arrangement, view.number)
            self._performer.expect()
        elif course.queue:
            course.queue = deque(self._remaining(hit=False))

    def go_on_after(self, step: int) -> None:
        """A step has just been applied: act by what was planned for after it, if anything was, and
        mend what was found to differ in it.

        Raises:
            LetGo: what was planned was that this node goes.
        """
        course = self._course
        if course.plan.change is not None and course.plan.change.step == step:
            self._make_change()
            # New holders have stepped their share, and need those of the others at once.
            course.queue = deque(self._view.gathers())
        course.queue.extend(self._mends())
        if not course.queue:
            course.ledger.note_gathered(step)

    def open_gathers(self) -> Program:
        """What came after the last step, where somebody has not completed it."""
        if self._parts.ledger.gathered == self._course.stepped:
            return ()
        return (*self._view.gathers(), *self._mends())

    def _mends(self) -> Program:
        """What is to be done about copies of the state that differed before the last step."""
        return self._view.mends(self._parts.verification.stages_to_mend(self._course.plan))

    def hold(self, plan: Plan) -> None:
        """Hold the stages that are this worker's under a plan, and those that it will have."""
        now, change = self._holding(plan.pipelines[self._view.number]), plan.change
        if change is None:
            self._performer.shapes = self._parts.hold(now, None)
            return
        number = plan.pipeline_after(self._parts.worker)
        later = self._holding(change.pipelines[number])
        if number in change.recut:
            self._performer.shapes = self._parts.hold(now, later)
        else:
            both = Holding({*now.numbers, *later.numbers}, now.shape)
            self._performer.shapes = self._parts.hold(both, None)

    def _holding(self, pipeline: PipelinePlan) -> Holding:
        return Holding(stages_to_hold(pipeline, self._parts.worker), pipeline.shape)

    def enter(self, plan: Plan, is_changed: bool = False) -> None:
        """Be in the groups and on the channels of a plan."""
        parts, view = self._parts, self._view
        parts.registry.update(plan.epoch, self._memberships(plan), is_changed)
        if self._course.is_in_step and not self._course.is_passed:
            parts.registry.form_collectives()
        view.set_plan(plan)
        parts.transport.connect(all_neighbours(plan, parts.worker, view.tied))

    def _make_change(self) -> None:
        before, plan = self._course.plan, self._course.plan.made()
        assert before.change is not None
        self._course.plan, let_go = plan, before.let_go
        if self._parts.worker not in plan.nodes:
            raise LetGo
        # They end when they like. Nothing is under way to or from them: the commit has passed.
        self._parts.registry.forget(let_go)
        self._parts.transport.drop(let_go)
        self._parts.promote()
        self._view.make_change(plan, before.change.step)
        self.enter(plan, is_changed=True)
        self.hold(plan)

    def _gather_again(self, decision: StepDecision | None) -> None:
        """Take back that all is there after a step, where another has not got all of its own."""
        ledger = self._parts.ledger
        # A standby that has not joined yet holds nothing.
        if decision is not None and (self._view.gathers() or self._mends()):
            ledger.note_gathered(min(ledger.gathered, decision.gathered))

    def _adopt_mirrors(self) -> None:
        """Go on from the victim's gradients that are here."""
        step, parts = self._course.state.step, self._parts
        for mirror in self._view.adopted:
            tensor = self._performer.take(Message(step, mirror), "its sender")
            parts.mirrors.adopt(mirror, tensor, self._course.state)
            parts.compute.go_on_from(mirror)
            parts.events.emit(
                "mirror",
                stage=mirror.stage,
                chunk=mirror.chunk,
                microbatch=mirror.microbatch,
                pipeline=self._view.number,
                step=step,
                epoch=self._course.plan.epoch,
            )

    def _remaining(self, hit: bool) -> Iterator[Action]:
        """What is left of the step under the new plan, and of the gather of the one before."""
        course, view = self._course, self._view
        yield from self.open_gathers()
        if not course.is_in_step:
            return
        step = course.state.step
        if course.is_passed:
            yield from (a for a in view.tail(step) if a.op is Op.STEP or a.op in GATHER_OPS)
            return
        compute = view.remaining(course.state.done) if hit else course.queue
        yield from view.state_sends(step)
        yield from (action for action in compute if action.op not in TAIL_OPS)
        yield from view.tail(step)

    def _published_progress(self, plan: Plan, seconds: float) -> dict[int, StepProgress]:
        """By rank, what the survivors of this pipeline published when the epoch ended."""
        published = {}
        for rank in self._view.survivors(plan):
            node = self._view.pipeline.ranks[rank]
            progress = self._course.epochs.progress_of(plan.epoch - 1, node, seconds)
            if progress is not None:
                published[rank] = progress
        return published

    def _memberships(self, plan: Plan) -> dict[str, tuple[str, ...]]:
        parts, view = self._parts, self._view
        return memberships(plan, parts.worker, view.tied, parts.tensor_size, view.sharded)

    def _log_takeover(self, before: Plan, plan: Plan, start: float) -> None:
        events, number, step = self._parts.events, self._view.number, self._course.state.step
        seconds = time.monotonic() - start
        events.emit("epoch", epoch=plan.epoch, step=step, lost=plan.lost, seconds=seconds)
        stages = zip(before.pipelines[number].stages, self._view.pipeline.stages, strict=True)
        for stage, (victim, shadow) in enumerate(stages):
            if victim != shadow == self._parts.worker:
                self._course.taken_over[stage] = self._course.epochs.ended_at
                events.emit(
                    "takeover",
                    stage=stage,
                    pipeline=number,
                    step=step,
                    epoch=plan.epoch,
                    victim=victim,
                    shadow=shadow,
                    in_step=bool(self._course.queue) and self._course.is_in_step,
                )
