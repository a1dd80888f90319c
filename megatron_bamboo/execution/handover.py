"""Brings units into the stages of a new cut, from whoever holds them.

In one step each worker gets the state that its new stages have before the step, and the step's
final gradient: so it makes the same optimizer step as those who trained, and is in sync when the
commit has passed. What it holds already it copies within its own memory.
"""

from collections.abc import Mapping

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_bamboo.execution.held_stages import HeldStages
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.tail import Receive
from megatron_bamboo.execution.transport import TensorShape, Transport
from megatron_bamboo.model.moving import Counters, copy_unit, num_bytes, pack, unpack
from megatron_bamboo.model.optimizer_state import optimizers_of, set_step
from megatron_bamboo.model.precision import LossScale
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.planner.arrangement import unit_names
from megatron_bamboo.schedule.actions import Action, Op


class UnitHandover:
    """One worker's part in a new cut; units are named by their numbers.

    Args:
        num_units: of the model.
        batch_size: the samples of a step.
    """

    def __init__(
        self,
        held: HeldStages,
        transport: Transport,
        scheduler: OptimizerParamScheduler,
        loss_scale: LossScale,
        num_units: int,
        batch_size: int,
    ) -> None:
        self._held = held
        self._transport = transport
        self._scheduler = scheduler
        self._loss_scale = loss_scale
        self._names = unit_names(num_units)
        self._batch_size = batch_size

    def shape_of(self, receive: Action) -> TensorShape:
        """What the message of a receive looks like."""
        stage, name = self._coming(receive.stage)
        gradient = stage.units[name].stepped_gradient
        if receive.op is Op.RECV_UNIT_GRADIENT:
            return TensorShape(tuple(gradient.shape), gradient.dtype, gradient.device)
        return TensorShape((num_bytes(stage, name),), torch.uint8, gradient.device)

    def send_state(self, number: int, peer: str, state: StepState) -> None:
        """Send a unit's state, as it is before this step, to a new holder."""
        self._send(number, Op.RECV_UNIT, peer, self._pack(*self._own(number)), state)

    def send_gradient(self, number: int, peer: str, state: StepState) -> None:
        """Send a unit's final gradient, or the share of it that is stepped here: a copy, since the
        optimizer's step changes it."""
        stage, name = self._own(number)
        gradient = stage.units[name].stepped_gradient.clone()
        self._send(number, Op.RECV_UNIT_GRADIENT, peer, gradient, state)

    def take_state(self, number: int, peer: str | None, state: StepState, receive: Receive) -> None:
        """Put a unit's state in place in the stages of the new cut.

        Args:
            peer: who sends it; None where this worker holds it.

        Raises:
            ValueError: it is not what was sent. This worker must end: nobody knows what it holds.
        """
        stage, name = self._coming(number)
        if peer is None:
            own, _ = self._own(number)
            copy_unit(own, stage, name)
        else:
            packed = receive(_message(number, Op.RECV_UNIT, state), peer)
            counters = unpack(stage, packed, name)
            self._loss_scale.load(counters.loss_scale)
            self._scheduler.num_steps = counters.num_samples
        for optimizer in optimizers_of(stage):
            set_step(optimizer, self._scheduler.num_steps // self._batch_size)

    def take_gradient(
        self, number: int, peer: str | None, state: StepState, receive: Receive
    ) -> None:
        """Put a unit's final gradient in place, likewise."""
        stage, name = self._coming(number)
        if peer is None:
            own, _ = self._own(number)
            gradient = own.units[name].stepped_gradient
        else:
            gradient = receive(_message(number, Op.RECV_UNIT_GRADIENT, state), peer)
        stage.units[name].stepped_gradient.copy_(gradient)

    def _own(self, number: int) -> tuple[Stage, str]:
        return _stage_with(self._names[number], self._held.stages)

    def _coming(self, number: int) -> tuple[Stage, str]:
        return _stage_with(self._names[number], self._held.coming)

    def _pack(self, stage: Stage, name: str) -> Tensor:
        return pack(stage, Counters(self._scheduler.num_steps, self._loss_scale.state()), name)

    def _send(self, number: int, op: Op, peer: str, tensor: Tensor, state: StepState) -> None:
        message = _message(number, op, state)
        if (message, peer) not in state.sent:
            state.sent.add((message, peer))
            self._transport.send(peer, message, tensor)


def _message(number: int, op: Op, state: StepState) -> Message:
    return Message(state.step, Action(number, None, op, None))


def _stage_with(name: str, stages: Mapping[int, Stage]) -> tuple[Stage, str]:
    return next(stage for stage in stages.values() if name in stage.units), name
