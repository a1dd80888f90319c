"""Forward passes alone, as an evaluation runs them: no dropout, no gradients, nothing kept.

Megatron-core's own ``forward_step`` does the work, as in training.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from megatron.core.pipeline_parallel.schedules import forward_step
from torch import Tensor

from megatron_bamboo.data.replay import ReplayedIterator
from megatron_bamboo.model.place import set_current_stage
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.script.providers import ForwardStepFunc


class Forwards:
    """The forward passes of one worker's stages.

    Args:
        stages: what the worker holds, now and later.
        forward_step_func: the script's.
    """

    def __init__(self, stages: Mapping[int, Stage], forward_step_func: ForwardStepFunc) -> None:
        self._stages = stages
        self._forward_step_func = forward_step_func

    @contextmanager
    def evaluating(self, numbers: Collection[int]) -> Iterator[None]:
        """Within it these stages are as Megatron evaluates them; they train after it."""
        chunks = [chunk for number in numbers for chunk in self._stages[number].chunks]
        for chunk in chunks:
            chunk.train(False)  # without dropout
        try:
            with torch.no_grad():
                yield
        finally:
            for chunk in chunks:
                chunk.train()

    def run(
        self,
        action: Action,
        schedule: Schedule,
        input_tensor: Tensor | None,
        microbatches: ReplayedIterator,
    ) -> tuple[Tensor, Any]:
        """The output of F, and what the loss function reported at the model's end."""
        assert action.chunk is not None and action.microbatch is not None
        chunk = self._stages[action.stage].chunks[action.chunk]
        is_last = schedule.downstream(action, Op.F) is None
        microbatches.select(action.microbatch)
        set_current_stage(action.stage, action.chunk, schedule.num_stages, schedule.num_chunks)
        reported: list[Any] = []
        output, _num_tokens = forward_step(
            self._forward_step_func,
            microbatches,
            chunk,
            schedule.num_microbatches,
            input_tensor,
            reported,
            chunk.config,
            cp_group_size=1,
            current_microbatch=action.microbatch,
            is_last_stage=is_last,
        )
        return output, reported[0] if is_last else None
