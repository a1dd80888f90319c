"""When the model is evaluated and on which samples: a function of the step alone, as Megatron's.

Megatron goes on in the validation samples from evaluation to evaluation, so each has samples of its
own; it counts them, and finds the count again in its checkpoints. Here the count follows from the
step, so that whoever comes to an evaluation, after whatever losses or from a checkpoint, reads the
same samples. After the training the next ones follow, and then as many of the test part.
"""

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Which of the evaluations that there may be after one step."""

    INTERVAL = "interval"
    """While the training goes on."""
    VALIDATION = "validation"
    """After the training, on validation samples."""
    TEST = "test"
    """After the training, on the test part."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """One evaluation."""

    step: int
    """After this one."""
    kind: Kind
    first_batch: int
    """As many global batches of its samples lie before its own."""
    num_batches: int

    @property
    def key(self) -> str:
        """Names it among all of a job."""
        return f"{self.step}/{self.kind}"

    def __str__(self) -> str:
        return f"the {self.kind} evaluation of step {self.step}"


@dataclass(frozen=True, slots=True)
class EvaluationPlan:
    """Which evaluations a run has."""

    interval: int | None
    """Steps from one to the next; None: there are none."""
    num_batches: int
    """Global batches of each."""
    train_iters: int

    @property
    def is_empty(self) -> bool:
        """Whether nothing is ever evaluated."""
        return self.interval is None or self.num_batches == 0

    @property
    def validation_batches(self) -> int:
        """Global batches of validation samples that the whole run takes."""
        if self.interval is None:
            return 0
        return (self.train_iters // self.interval + 1) * self.num_batches

    @property
    def test_batches(self) -> int:
        """Global batches of test samples that it takes if there are any."""
        return 0 if self.interval is None else self.num_batches

    def is_due(self, step: int) -> bool:
        """Whether there is an evaluation while the training goes on, after a step."""
        return self.interval is not None and not self.is_empty and step % self.interval == 0

    def after_step(self, step: int) -> tuple[Evaluation, ...]:
        """That evaluation, if there is one."""
        if self.interval is None or not self.is_due(step):
            return ()
        before = step // self.interval - 1
        first = before * self.num_batches
        return (Evaluation(step, Kind.INTERVAL, first, self.num_batches),)

    def after_training(self, has_test: bool) -> tuple[Evaluation, ...]:
        """Those after the last step.

        Args:
            has_test: whether there are samples for a test.
        """
        if self.interval is None or self.is_empty:
            return ()
        step, first = self.train_iters, self.train_iters // self.interval * self.num_batches
        last = Evaluation(step, Kind.VALIDATION, first, self.num_batches)
        test = Evaluation(step, Kind.TEST, 0, self.num_batches)
        return (last, test) if has_test else (last,)
