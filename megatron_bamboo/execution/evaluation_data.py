"""What an evaluation reads: a function of the evaluation and of the pipeline's share alone."""

from collections.abc import Iterator, Sequence
from typing import Any

from torch.utils.data import Dataset

from megatron_bamboo.data.gpt_dataset import Datasets, read_microbatch
from megatron_bamboo.data.samples import microbatch_samples
from megatron_bamboo.evaluation.due import Evaluation, Kind
from megatron_bamboo.observe.events import EventLog


class EvaluationData:
    """Reads the samples of evaluations, and logs which they are."""

    def __init__(
        self, datasets: Datasets, micro_batch_size: int, global_batch_size: int, events: EventLog
    ) -> None:
        self._datasets = datasets
        self._micro_batch_size = micro_batch_size
        self._global_batch_size = global_batch_size
        self._events = events

    @property
    def has_test(self) -> bool:
        """Whether there are samples for a test."""
        return self._datasets.test is not None

    def microbatches(
        self, evaluation: Evaluation, batch: int, numbers: Sequence[int]
    ) -> Iterator[Any]:
        """Some microbatches of one global batch, in order.

        Args:
            batch: counts from 0 in each evaluation.
            numbers: the global microbatches.
        """
        dataset = self._dataset(evaluation.kind)
        sizes = (self._micro_batch_size, self._global_batch_size)
        for number in numbers:
            indices = microbatch_samples(evaluation.first_batch + batch, number, *sizes)
            self._events.emit(
                "evaluation_samples",
                step=evaluation.step,
                kind=evaluation.kind,
                batch=batch,
                samples=list(indices),
            )
            yield read_microbatch(dataset, indices)

    def _dataset(self, kind: Kind) -> "Dataset[Any]":
        data = self._datasets
        dataset = data.test if kind is Kind.TEST else data.validation
        assert dataset is not None, f"there are no samples for a {kind} evaluation"
        return dataset
