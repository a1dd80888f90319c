"""Runs forward and backward actions on a worker's stages.

Megatron-core's own ``forward_step`` and ``backward_step`` do the work, so that with the same
inputs the bits are those of Megatron's schedules.
"""

import contextlib
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import backward_step, forward_step
from torch import Tensor

from megatron_bamboo.config import ReplicaMemory
from megatron_bamboo.data.replay import ReplayedIterator
from megatron_bamboo.execution.deferred import DeferredSums
from megatron_bamboo.execution.mailbox import Mailbox, Message
from megatron_bamboo.execution.reported import loss_of
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.model.host_memory import HostMemory
from megatron_bamboo.model.place import set_current_stage
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.saved_storages import SavedStorages
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.planner.arrangement import Arrangement
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.script.providers import ForwardStepFunc


class Compute:
    """The forward and backward passes of one worker."""

    def __init__(
        self,
        stages: Mapping[int, Stage],
        dropout: DropoutSeeds,
        mailbox: Mailbox,
        replica_memory: ReplicaMemory,
        counts_memory: bool = False,
    ) -> None:
        self._stages = stages
        self._dropout = dropout
        self._mailbox = mailbox
        self._replica_memory = replica_memory
        self._counts_memory = counts_memory
        self.host_memory = HostMemory()
        self.saved, self.saved_redundant = SavedStorages(), SavedStorages()
        """What forwards keep on the device until their backwards, if it is counted."""
        self._sums = DeferredSums(stages)
        self._forward_step: ForwardStepFunc | None = None
        self._source: Iterable[Any] = ()
        self._data: ReplayedIterator | None = None
        self._numbers: tuple[int, ...] = ()
        self._total_microbatches = 0

    def start_step(
        self,
        data: Iterable[Any],
        forward_step: ForwardStepFunc,
        arrangement: Arrangement,
        pipeline: int,
    ) -> None:
        """Take up a step's microbatches and what is done with each; forget the gradients of the
        step before, on replicas too.

        Args:
            data: gives them anew each time that it is gone through.
            arrangement: what says which of the global microbatches these are.
            pipeline: that of this worker.
        """
        self._source, self._forward_step = data, forward_step
        self._start(arrangement, pipeline)

    def start_again(self, arrangement: Arrangement, pipeline: int) -> None:
        """Forget what was done in a step; its microbatches may be others now.

        Raises:
            ValueError: the step's microbatches cannot be gone through again.
        """
        if iter(self._source) is self._source:
            raise ValueError(
                "a step is begun anew with other microbatches, and an iterator gives its own only "
                "once: give forward_backward_func what microbatches() returns as it is"
            )
        self._start(arrangement, pipeline)

    def _start(self, arrangement: Arrangement, pipeline: int) -> None:
        self._data = ReplayedIterator(iter(self._source))
        self._numbers = arrangement.global_microbatches(pipeline)
        self._total_microbatches = arrangement.total_microbatches
        self._sums.start_step()
        for stage in self._stages.values():
            stage.start_step()

    def forward(self, action: Action, schedule: Schedule, state: StepState) -> None:
        """Run F or RF: the same function of the same inputs, on the primary or the replica."""
        key = action.with_op(Op.F)
        assert action.microbatch is not None
        input_tensor = self._input(key, schedule, state)
        with self._kept_as_asked(action, input_tensor):
            output, reported = self._run(key, schedule, state, input_tensor)
        if action.op is Op.F or self._replica_memory is not ReplicaMemory.RECOMPUTE:
            state.saved[key] = (input_tensor, output)
        if schedule.downstream(key, Op.F) is None:
            state.reports[action.microbatch] = reported
            state.losses[action.microbatch] = loss_of(reported)
        else:
            state.outputs[key] = output.detach().contiguous()

    def backward(self, action: Action, schedule: Schedule, state: StepState) -> None:
        """Run B: adds to the gradients, keeps the gradient of the input."""
        forward = action.with_op(Op.F)
        input_tensor, output = state.saved.pop(forward, (None, None))
        if output is None:  # a redundant forward's, which was dropped
            input_tensor = self._input(forward, schedule, state)
            output, _ = self._run(forward, schedule, state, input_tensor)
        gradient = self._output_gradient(action, schedule, state)
        assert action.chunk is not None
        config = self._stages[action.stage].chunks[action.chunk].config
        # What is recomputed draws the masks of this microbatch again.
        self._set_context(action, schedule, state.step)
        with self._sums.backward(action):
            input_gradient = backward_step(input_tensor, output, gradient, None, config)
        if input_gradient is not None:
            # As it goes over the wire, so that a local neighbour computes the same bits.
            state.input_gradients[action] = input_gradient.contiguous()

    def go_on_from(self, mirror: Action) -> None:
        """The gradients of a chunk are those of a mirror now."""
        assert mirror.chunk is not None and mirror.microbatch is not None
        self._sums.go_on_after(mirror.stage, mirror.chunk, mirror.microbatch)

    def _run(
        self, forward: Action, schedule: Schedule, state: StepState, input_tensor: Tensor | None
    ) -> tuple[Tensor, Any]:
        """The output of a forward, and what the loss function reported at the model's end."""
        assert forward.chunk is not None and forward.microbatch is not None
        assert self._forward_step is not None and self._data is not None
        chunk = self._stages[forward.stage].chunks[forward.chunk]
        is_last = schedule.downstream(forward, Op.F) is None
        self._data.select(forward.microbatch)
        self._set_context(forward, schedule, state.step)
        reported: list[Any] = []
        output, _num_tokens = forward_step(
            self._forward_step,
            self._data,
            chunk,
            # Each microbatch counts 1/total, over all pipelines.
            self._total_microbatches,
            input_tensor,
            reported,
            chunk.config,
            cp_group_size=1,
            current_microbatch=forward.microbatch,
            is_last_stage=is_last,
        )
        return output, reported[0] if is_last else None

    def _kept_as_asked(
        self, action: Action, input_tensor: Tensor | None
    ) -> AbstractContextManager[Any]:
        """What becomes of what a forward saves for its backward."""
        if action.op is Op.F or self._replica_memory is ReplicaMemory.DEVICE:
            saved = self.saved if action.op is Op.F else self.saved_redundant
            return saved.recording() if self._counts_memory else contextlib.nullcontext()
        if self._replica_memory is ReplicaMemory.RECOMPUTE:
            return torch.no_grad()
        assert action.chunk is not None
        parameters = self._stages[action.stage].chunks[action.chunk].parameters()
        inputs = [] if input_tensor is None else [input_tensor]
        return self.host_memory.saving([*parameters, *inputs])

    def _input(self, forward: Action, schedule: Schedule, state: StepState) -> Tensor | None:
        producer = schedule.upstream(forward, Op.F)
        if producer is None:
            return None  # data
        tensor = state.outputs.get(producer)
        if tensor is None:
            tensor = self._received(forward.with_op(Op.RECV_F), state.step)
        return tensor.detach().requires_grad_()

    def _output_gradient(
        self, backward: Action, schedule: Schedule, state: StepState
    ) -> Tensor | None:
        producer = schedule.downstream(backward, Op.B)
        if producer is None:
            return None  # the loss
        tensor = state.input_gradients.get(producer)
        if tensor is None:
            tensor = self._received(backward.with_op(Op.RECV_B), state.step)
        return tensor

    def _received(self, receive: Action, step: int) -> Tensor:
        """A message that an action before this one has waited for."""
        return self._mailbox.take(Message(step, receive), 0.0, lambda: False, "its sender")

    def _set_context(self, action: Action, schedule: Schedule, step: int) -> None:
        assert action.chunk is not None and action.microbatch is not None
        set_current_stage(action.stage, action.chunk, schedule.num_stages, schedule.num_chunks)
        self._dropout.step = step
        self._dropout.microbatch = self._numbers[action.microbatch]
