"""What each action does: a table from operation to method.

An action can be run again after a loss; it then does only what is not done yet.
"""

import time
from collections.abc import Callable

from torch import Tensor

from megatron_bamboo.execution.course import Course
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.execution.parts import Parts, Shapes
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.transport import Expected, TensorShape
from megatron_bamboo.schedule.actions import GATHER_OPS, UNIT_OPS, Action, Op


class Performer:
    """Performs one worker's actions.

    Args:
        course: how far the worker has come; a performed action may move it on.
    """

    def __init__(self, parts: Parts, view: PipelineView, course: Course) -> None:
        self._parts = parts
        self._view = view
        self._course = course
        self.shapes: Shapes | None = None
        """What messages look like for the stages that are held."""
        self._table: dict[Op, Callable[[Action], None]] = {
            Op.F: lambda a: parts.compute.forward(a, view.in_force, course.state),
            Op.RF: lambda a: parts.compute.forward(a, view.in_force, course.state),
            Op.B: lambda a: parts.compute.backward(a, view.in_force, course.state),
            Op.SEND_F: self._send_output,
            Op.SEND_B: self._send_gradient,
            Op.RECV_F: self._receive,
            Op.RECV_B: self._receive,
            Op.SEND_MIRROR: self._send_mirror,
            Op.RECV_MIRROR: lambda a: None,  # its channel expects it since the step began
            Op.REDUCE: lambda a: parts.tail.reduce(a.stage, view.arrangement, course.state),
            Op.SEND_TIE: lambda a: parts.tail.send_tie(a.stage, view.pipeline, course.state),
            Op.TIE: lambda a: parts.tail.tie(a.stage, view.pipeline, course.state, self.take),
            Op.SEND_REFRESH: self._send_refresh,
            Op.RECV_REFRESH: self._receive_refresh,
            Op.SEND_STATE: self._send_state,
            Op.RECV_STATE: self._receive_state,
            Op.SEND_UNIT: self._send_unit,
            Op.SEND_UNIT_GRADIENT: self._send_unit_gradient,
            Op.RECV_UNIT: self._receive_unit,
            Op.RECV_UNIT_GRADIENT: self._receive_unit_gradient,
            Op.VERIFY: lambda a: parts.verification.make_digests(course.plan),
            Op.COMMIT: self._commit,
            Op.STEP: self._step,
            Op.GATHER: self._gather,
            Op.RGATHER: self._gather,
            Op.MEND: self._mend,
            Op.RMEND: self._mend,
        }

    def perform(self, action: Action) -> None:
        """Do one action.

        Raises:
            PeerLost: a wait failed, perhaps since a node is lost.
            EpochEnded: a new plan is there.
        """
        self._table[action.op](action)

    def take(self, message: Message, sender: str) -> Tensor:
        """Wait for a message that this worker expects.

        Raises:
            PeerLost: nothing came in time.
            EpochEnded: a new plan came first.
        """
        return self._parts.transport.mailbox.take(
            message, self._parts.wait_seconds, self._course.epochs.has_pending, sender
        )

    def expect(self) -> None:
        """Let the channels receive what the program waits for, in its order."""
        step = self._state.step
        self._parts.transport.expect(
            Expected(Message(step, action), sender, self._shape_of(action))
            for action, sender in self._view.awaited(step)
        )

    @property
    def _state(self) -> StepState:
        return self._course.state

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
        self.take(Message(self._state.step, action), sender)

    def _send_refresh(self, action: Action) -> None:
        for peer in self._view.refreshed(action.stage, self._state.step):
            self._parts.tail.send_refresh(action.stage, peer, self._state)

    def _receive_refresh(self, action: Action) -> None:
        peer = self._view.pipeline.stages[action.stage]
        # So that no mirror of this step is under way in the next one.
        for mirror in self._view.last_mirrors(action.stage):
            self.take(Message(self._state.step, mirror), peer)
        self._parts.tail.receive_refresh(action.stage, peer, self._state, self.take)

    def _send_state(self, action: Action) -> None:
        for peer in self._view.given(action.stage, self._state.step):
            self._parts.tail.send_state(action.stage, peer, self._state)

    def _receive_state(self, action: Action) -> None:
        peer = self._view.sender_of(action)
        self._parts.tail.receive_state(action.stage, peer, self._state, self._fetch)

    def _fetch(self, message: Message, sender: str) -> Tensor:
        """Wait for state, and log for how long: it should be here when nothing else is to do."""
        start = time.monotonic()
        state = self.take(message, sender)
        what = "unit" if message.receive.op in UNIT_OPS else "stage"
        self._parts.events.emit(
            "fetch",
            **{what: message.receive.stage},
            pipeline=self._view.number,
            peer=sender,
            step=message.step,
            epoch=self._course.plan.epoch,
            bytes=state.nbytes,
            seconds=time.monotonic() - start,
        )
        return state

    def _send_unit(self, action: Action) -> None:
        for peer in self._view.unit_targets(action.stage):
            self._parts.handover.send_state(action.stage, peer, self._state)

    def _send_unit_gradient(self, action: Action) -> None:
        for peer in self._view.unit_targets(action.stage):
            self._parts.handover.send_gradient(action.stage, peer, self._state)

    def _receive_unit(self, action: Action) -> None:
        source = self._view.unit_source(action.stage)
        self._parts.handover.take_state(action.stage, source, self._state, self._fetch)

    def _receive_unit_gradient(self, action: Action) -> None:
        source = self._view.unit_source(action.stage)
        self._parts.handover.take_gradient(action.stage, source, self._state, self.take)

    def _commit(self, action: Action) -> None:
        numbers = self._view.arrangement.global_microbatches(self._view.number)
        view = self._view
        self._parts.tail.commit(view.pipeline, numbers, view.is_first, self._state)

    def _step(self, action: Action) -> None:
        state, parts = self._state, self._parts
        if state.step == self._view.recut_step:
            parts.promote()
        parts.tail.step(state)
        parts.transport.finish_step(state.step)
        # Only the step's number and progress are still asked for.
        self._course.state = StepState(state.step)
        self._course.stepped = state.step

    def _gather(self, action: Action) -> None:
        self._parts.tail.gather(action.stage, self._view.arrangement)
        self._note_completed()

    def _mend(self, action: Action) -> None:
        self._parts.verification.mend(action.stage, self._course.plan)
        self._note_completed()

    def _note_completed(self) -> None:
        """Where this was the last action of a step, say that this worker has all of the step."""
        if len(self._course.queue) == 1 or self._course.queue[1].op not in GATHER_OPS:
            self._parts.ledger.note_gathered(self._course.stepped)

    def _shape_of(self, action: Action) -> TensorShape:
        shapes = self.shapes
        assert shapes is not None, "start() comes first"
        if action.op is Op.RECV_MIRROR:
            return self._parts.mirrors.shape(action)
        if action.op is Op.RECV_REFRESH:
            return shapes.refresh[action.stage]
        if action.op in UNIT_OPS:
            return self._parts.handover.shape_of(action)
        if action.op is Op.RECV_STATE:
            return shapes.state(action.stage)
        if action.op is Op.TIE:
            assert shapes.tied is not None
            return shapes.tied
        return shapes.activation
