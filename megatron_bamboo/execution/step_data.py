"""A pipeline's microbatches of a step: a function of the plan, the seed and the step alone."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

from torch.utils.data import Dataset

from megatron_bamboo.data.gpt_dataset import read_microbatch
from megatron_bamboo.data.samples import microbatch_samples
from megatron_bamboo.execution.pipeline import PipelineView
from megatron_bamboo.observe.events import EventLog


class StepData:
    """Reads what a worker's pipeline trains on, and logs which samples those are."""

    def __init__(
        self,
        dataset: "Dataset[Any]",
        micro_batch_size: int,
        global_batch_size: int,
        view: PipelineView,
        events: EventLog,
    ) -> None:
        self._dataset = dataset
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._view = view
        self._events = events

    def microbatches(self, step: int) -> Iterable[Any]:
        """They can be gone through again: in a step that is begun anew they are others."""
        return _Repeated(lambda: self._read(step))

    def _read(self, step: int) -> Iterator[Any]:
        numbers = self._view.arrangement.global_microbatches(self._view.number)
        attempt = self._view.attempt(step)
        for microbatch, number in enumerate(numbers):
            indices = microbatch_samples(
                step - 1, number, self._micro_batch_size, self._global_batch_size
            )
            self._events.emit(
                "samples",
                step=step,
                attempt=attempt,
                pipeline=self._view.number,
                microbatch=microbatch,
                samples=list(indices),
            )
            yield read_microbatch(self._dataset, indices)


class _Repeated:
    """A step's microbatches, from the first one on each time that they are gone through."""

    def __init__(self, microbatches: Callable[[], Iterator[Any]]) -> None:
        self._microbatches = microbatches

    def __iter__(self) -> Iterator[Any]:
        return self._microbatches()
