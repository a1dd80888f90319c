"""The mirrors of a worker's stages: copied where they are sent, adopted where they are needed.

A mirror holds the gradients of one chunk's units, one after the other, as they lie in the buffers.
That of the model's end holds the losses too: they belong to forwards which are not run again.
"""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.transport import TensorShape
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.mirrors import covered_by


class Mirrors:
    """What mirrors of one worker's stages, replicas included, are made of.

    Args:
        shape: that of the pipeline in the step under way.
    """

    def __init__(self, stages: Mapping[int, Stage], shape: Callable[[], PipelineShape]) -> None:
        self._stages = stages
        self._shape = shape

    def shape(self, mirror: Action) -> TensorShape:
        """What a mirror looks like as a message."""
        gradients = self._gradients(mirror)
        like = gradients[0]
        length = sum(part.numel() for part in gradients)
        if self._is_end(mirror):
            length += self._shape().num_microbatches * torch.float64.itemsize // like.dtype.itemsize
        return TensorShape((length,), like.dtype, like.device)

    def copy(self, mirror: Action, state: StepState) -> Tensor:
        """The gradient as it is now, apart from the buffers that it goes on in."""
        gradients = self._gradients(mirror)
        if not self._is_end(mirror):
            return torch.cat(gradients)
        losses = [state.losses.get(m, math.nan) for m in range(self._shape().num_microbatches)]
        like = gradients[0]
        exact = torch.tensor(losses, dtype=torch.float64, device=like.device)
        return torch.cat([*gradients, exact.view(like.dtype)])

    def adopt(self, mirror: Action, tensor: Tensor, state: StepState) -> None:
        """Go on from a mirror: what it covers is done, and nothing of it was done here."""
        gradients = self._gradients(mirror)
        sizes = [part.numel() for part in gradients]
        parts = tensor.split([*sizes, tensor.numel() - sum(sizes)])
        for gradient, part in zip(gradients, parts, strict=False):
            gradient.copy_(part)
        losses = parts[-1].clone().view(torch.float64).tolist()
        for action in covered_by([mirror]):
            state.saved.pop(action, None)  # a redundant forward's, whose backward never runs
            if action.op is Op.F and self._is_end(mirror):
                assert action.microbatch is not None
                state.losses[action.microbatch] = losses[action.microbatch]

    def _gradients(self, mirror: Action) -> tuple[Tensor, ...]:
        assert mirror.chunk is not None
        return self._stages[mirror.stage].gradients(mirror.chunk)

    def _is_end(self, mirror: Action) -> bool:
        shape = self._shape()
        return (mirror.stage, mirror.chunk) == (shape.num_stages - 1, shape.num_chunks - 1)
