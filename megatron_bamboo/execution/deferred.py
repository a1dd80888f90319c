"""Gradients that were computed before those of earlier microbatches, until it is their turn.

After a takeover others wait for the backwards of late microbatches, and nobody for those that only
the victim's sum had. Whatever the order they run in, they are summed in ascending order, and so
with the bits that they would have had. What waits is apart from the sum, on a GPU in host memory.
"""

import contextlib
from collections import defaultdict
from collections.abc import Iterator, Mapping
from typing import TypeAlias

from torch import Tensor

from megatron_bamboo.model.stage import Stage
from megatron_bamboo.schedule.actions import Action

_Place: TypeAlias = tuple[int, int]  # stage and chunk


class DeferredSums:
    """The sums of one worker's stages, and what waits for its turn in them."""

    def __init__(self, stages: Mapping[int, Stage]) -> None:
        self._stages = stages
        self._next: defaultdict[_Place, int] = defaultdict(int)
        self._waiting: defaultdict[_Place, dict[int, list[Tensor]]] = defaultdict(dict)

    def start_step(self) -> None:
        """Begin all sums anew."""
        self._next.clear()
        self._waiting.clear()

    def go_on_after(self, stage: int, chunk: int, microbatch: int) -> None:
        """A chunk's sum holds all up to this microbatch."""
        self._next[stage, chunk] = microbatch + 1

    @contextlib.contextmanager
    def backward(self, action: Action) -> Iterator[None]:
        """Within it a backward adds to its stage's gradients; they are summed in order."""
        assert action.chunk is not None and action.microbatch is not None
        place = (action.stage, action.chunk)
        if action.microbatch == self._next[place]:
            yield
            self._next[place] += 1
            self._add_waiting(place)
            return
        gradients = self._gradients(place)
        sums = [gradient.clone() for gradient in gradients]
        for gradient in gradients:
            gradient.zero_()
        yield
        self._waiting[place][action.microbatch] = [_put_by(gradient) for gradient in gradients]
        for gradient, so_far in zip(gradients, sums, strict=True):
            gradient.copy_(so_far)

    def _add_waiting(self, place: _Place) -> None:
        waiting = self._waiting[place]
        while (parts := waiting.pop(self._next[place], None)) is not None:
            for gradient, part in zip(self._gradients(place), parts, strict=True):
                gradient.add_(part.to(gradient.device))
            self._next[place] += 1

    def _gradients(self, place: _Place) -> tuple[Tensor, ...]:
        stage, chunk = place
        return self._stages[stage].gradients(chunk)


def _put_by(gradient: Tensor) -> Tensor:
    """A copy in host memory."""
    return gradient.to("cpu", copy=True)
