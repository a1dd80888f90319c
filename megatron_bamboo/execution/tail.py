"""Runs the tail of an iteration: reduce, tie, refresh, commit, step, gather.

Each action can be run again after a loss and does only what is not done yet: a reduction is
complete in the group in which it was made, a message is sent once to the same peer. Reductions are
out of place, so their inputs are there until the commit.
"""

import math
from collections.abc import Callable, Sequence

import torch
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from torch import Tensor

from megatron_bamboo.execution.commit import CommitLayout, unit_part
from megatron_bamboo.execution.errors import TrainingError
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.mailbox import Message
from megatron_bamboo.execution.registry import (
    COMMIT_GROUP,
    GroupRegistry,
    holder_group,
    primary_group,
)
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.transport import Transport
from megatron_bamboo.execution.verification import Verification
from megatron_bamboo.model.moving import Counters, pack, unpack
from megatron_bamboo.model.optimizer_state import optimizers_of, set_step
from megatron_bamboo.model.precision import LossScale
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.planner.plan import PipelinePlan
from megatron_bamboo.schedule.actions import Action, Op

Receive = Callable[[Message, str], Tensor]


class Tail:
    """The tail actions of one worker."""

    def __init__(
        self,
        node: str,
        stages: dict[int, Stage],
        layout: CommitLayout,
        registry: GroupRegistry,
        transport: Transport,
        ledger: CommitLedger,
        scheduler: OptimizerParamScheduler,
        loss_scale: LossScale,
        batch_size: int,
        tensor_rank: int,
        verification: Verification,
        must_end: Callable[[], bool] = lambda: False,
    ) -> None:
        self._node = node
        self._stages = stages
        self._layout = layout
        self._registry = registry
        self._transport = transport
        self._ledger = ledger
        self._scheduler = scheduler
        self._loss_scale = loss_scale
        self._batch_size = batch_size
        self._tensor_rank = tensor_rank
        self._verification = verification
        self._must_end = must_end

    def reduce(self, stage_number: int, arrangement: Arrangement, state: StepState) -> None:
        """Sum a stage's gradients, unit by unit over its primaries, out of place.

        All workers do so in one order of the units, wherever their pipelines are cut. What the
        workers of one node do among themselves comes before all that a loss can break: where that
        ends the one and not yet the other, nothing would end the other's wait for the one.
        """
        stage = self._stages[stage_number]
        groups = {
            unit.name: primary_group(arrangement.stages_of(unit.name))
            for unit in stage.units.values()
        }
        units = [
            unit
            for unit in stage.units.values()
            if unit.name not in state.reduced_in
            or not self._registry.is_current(groups[unit.name], state.reduced_in[unit.name])
        ]
        for unit in units:
            unit.reduced.copy_(unit.gradient)
            stage.sum_sequence_parallel(unit)
        for unit in units:
            group = self._registry.get(groups[unit.name])
            if group is not None:
                group.all_reduce(unit.reduced)
            state.reduced_in[unit.name] = group
            if unit.name == stage.tied_unit:
                state.tied.discard(stage_number)
                state.role_gradients[stage_number] = stage.tied_gradient().clone()

    def send_tie(self, stage_number: int, pipeline: PipelinePlan, state: StepState) -> None:
        """Send this role's reduced gradient to the worker of the other role."""
        other = len(pipeline.stages) - 1 - stage_number
        message = Message(state.step, Action(other, None, Op.TIE, None))
        peer = pipeline.stages[other]
        self._send_once(peer, message, state.role_gradients[stage_number], state)

    def tie(
        self, stage_number: int, pipeline: PipelinePlan, state: StepState, receive: Receive
    ) -> None:
        """Add the two roles of the tied weight, first stage's first, apart from both inputs."""
        if stage_number in state.tied:
            return
        other = len(pipeline.stages) - 1 - stage_number
        if pipeline.stages[other] == self._node:
            theirs = state.role_gradients[other]
        else:
            message = Message(state.step, Action(stage_number, None, Op.TIE, None))
            theirs = receive(message, pipeline.stages[other])
        roles = sorted(
            [(stage_number, state.role_gradients[stage_number]), (other, theirs)],
            key=lambda role: role[0],
        )
        self._stages[stage_number].tied_gradient().copy_(roles[0][1] + roles[1][1])
        state.tied.add(stage_number)

    def send_refresh(self, stage_number: int, peer: str, state: StepState) -> None:
        """Send what its replica steps of a stage's final gradient.

        A copy is sent: a loss may make the reduction run again while this is under way. The
        replica's holder enters the commit only when it has it, so a passed commit acknowledges it.
        """
        message = Message(state.step, Action(stage_number, None, Op.RECV_REFRESH, None))
        self._send_once(peer, message, self._stages[stage_number].stepped_gradient(), state)

    def receive_refresh(
        self, stage_number: int, peer: str, state: StepState, receive: Receive
    ) -> None:
        """Take a primary's final gradient for the replica held here."""
        message = Message(state.step, Action(stage_number, None, Op.RECV_REFRESH, None))
        self._stages[stage_number].set_stepped_gradient(receive(message, peer))

    def send_state(self, stage_number: int, peer: str, state: StepState) -> None:
        """Send all of a stage's state, as it is before this step, to a new holder."""
        message = Message(state.step, Action(stage_number, None, Op.RECV_STATE, None))
        counters = Counters(self._scheduler.num_steps, self._loss_scale.state())
        self._send_once(peer, message, pack(self._stages[stage_number], counters), state)

    def receive_state(
        self, stage_number: int, peer: str, state: StepState, receive: Receive
    ) -> None:
        """Put a stage's state, as it is before this step, in place.

        Raises:
            ValueError: it is not what was sent. This worker must end: nobody knows what it holds.
        """
        message = Message(state.step, Action(stage_number, None, Op.RECV_STATE, None))
        stage = self._stages[stage_number]
        counters = unpack(stage, receive(message, peer))
        for optimizer in optimizers_of(stage):
            set_step(optimizer, counters.num_samples // self._batch_size)
        self._loss_scale.load(counters.loss_scale)
        self._scheduler.num_steps = counters.num_samples
        self._scheduler.step(0)

    def commit(
        self, pipeline: PipelinePlan, numbers: Sequence[int], gives_units: bool, state: StepState
    ) -> None:
        """Agree with all live workers that the step is applied, and learn the commit vector.

        Args:
            numbers: by microbatch of this pipeline, its number among all.
            gives_units: the units' slots are this pipeline's to fill.
        """
        group = self._registry.get(COMMIT_GROUP)
        slots = [
            *self._contribution(pipeline, numbers, gives_units, state),
            *self._verification.slots(state.step),
        ]
        vector = torch.tensor(slots, dtype=torch.float64)

        def collective() -> Sequence[float]:
            if group is not None:
                group.all_reduce(vector)
            return [float(value) for value in vector]

        def release() -> None:
            if group is not None:
                group.release()

        self._ledger.commit(state.step, collective, release)

    def step(self, state: StepState) -> tuple[float, ...]:
        """Apply the step to everything held here; its commit has passed. Returns the vector.

        Where the loss is scaled, a step whose gradient overflows is skipped and the scale lowered.

        Raises:
            TrainingError: the loss is not finite, for which no scale is to blame, or the gradient
                is not and there is no scale.
        """
        vector = self._ledger.passed_vector(state.step)
        assert vector is not None, f"step {state.step} is applied before its commit"
        self._verification.judge(state.step, vector[self._layout.size :])
        norm = self._layout.gradient_norm(vector) / self._loss_scale.value
        loss = self._layout.loss(vector)
        may_skip = self._loss_scale.is_used and math.isfinite(loss)
        if not (math.isfinite(norm) and math.isfinite(loss)) and not may_skip:
            raise TrainingError(
                f"step {state.step}: the loss is {loss} and the gradient norm {norm}; "
                "lower the learning rate or look at the data"
            )
        if math.isfinite(norm):
            for stage in self._stages.values():
                stage.apply(norm)
            self._scheduler.step(self._batch_size)
        self._loss_scale.update(overflowed=not math.isfinite(norm))
        return vector

    def gather(self, stage_number: int, arrangement: Arrangement) -> None:
        """Get the parameters of a stage from those that have stepped them, the units' primaries.

        It can be run again until the next step: nobody's own parameters change in it.
        """
        for unit in self._stages[stage_number].units.values():
            group = self._registry.get(holder_group(arrangement.stages_of(unit.name)))
            assert group is not None, f"{unit.name} has one holder and more than one shard"
            group.share(unit.shards_of_parameters())

    def _contribution(
        self, pipeline: PipelinePlan, numbers: Sequence[int], gives_units: bool, state: StepState
    ) -> list[float]:
        """This worker's slots: one pipeline gives the units, each its losses."""
        own = [number for number, node in enumerate(pipeline.stages) if node == self._node]
        norms: dict[str, float] = {}
        if gives_units:
            for number in own:
                stage = self._stages[number]
                norms |= {
                    unit_part(unit.name, self._tensor_rank): stage.squared_norm(unit)
                    for unit in stage.units.values()
                }
        has_losses = len(pipeline.stages) - 1 in own and self._tensor_rank == 0
        losses = state.losses if has_losses else {}
        numbered = {numbers[m]: loss for m, loss in losses.items()}
        return self._layout.fill(norms, numbered, self._must_end())

    def _send_once(self, peer: str, message: Message, tensor: Tensor, state: StepState) -> None:
        if (message, peer) not in state.sent:
            state.sent.add((message, peer))
            self._transport.send(peer, message, tensor.clone())
