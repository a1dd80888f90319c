"""What workers know of an evaluation together: facts in the store, each written once.

Each pipeline tells what each of its global batches has reported, in order. So whoever comes later,
with or without a loss in between, finds how far it is; what is told twice is told alike.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_bamboo.evaluation.due import Evaluation
from megatron_bamboo.evaluation.outcome import (
    Evaluated,
    Reports,
    reports_from_json,
    reports_to_json,
)
from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.membership.restores import RESTORES_KEY
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout

# How often a waiting worker looks for a new plan; what it waits for ends the wait at once.
_SLICE_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Share:
    """One pipeline's part of each global batch, by what all have of it."""

    microbatches: tuple[int, ...]
    """By pipeline."""
    pipeline: int
    num_restores: int = 0
    """So often all went back to a checkpoint before: what was told until then counts no more."""

    def __str__(self) -> str:
        return f"{self.num_restores}/{'-'.join(map(str, self.microbatches))}/{self.pipeline}"


def batch_key(evaluation: Evaluation, share: Share, batch: int) -> str:
    """Where a pipeline tells what one global batch has reported."""
    return f"{_batches(evaluation, share)}{batch}"


def begin_key(evaluation: Evaluation, epoch: int, share: Share) -> str:
    """Where the first global batch of a pipeline in an epoch is."""
    return f"{_prefix(evaluation.step)}{evaluation.kind}/begin/{epoch}/{share.pipeline}"


def outcome_key(evaluation: Evaluation) -> str:
    """Where the outcome is."""
    return f"evaluated/{evaluation.key}"


class EvaluationStore:
    """The facts of evaluations, for one worker."""

    def __init__(self, client: StoreClient) -> None:
        self._client = client

    def num_restores(self) -> int:
        """How often all went back to a checkpoint so far."""
        known = self._client.get(RESTORES_KEY)
        return 0 if known is None else int(json.loads(known)["number"])

    def outcome(self, evaluation: Evaluation) -> Evaluated | None:
        """What came of it, if that is known."""
        value = self._client.get(outcome_key(evaluation))
        return None if value is None else Evaluated.from_json(value)

    def tell_outcome(self, evaluation: Evaluation, evaluated: Evaluated) -> None:
        """Write the outcome, unless somebody has."""
        self._client.compare_set(outcome_key(evaluation), None, evaluated.to_json().encode())

    def tell_begin(self, evaluation: Evaluation, epoch: int, share: Share) -> None:
        """Tell a pipeline's workers with which global batch they begin in an epoch: the first that
        was not reported.

        Only who reports may say so: nobody else does any more, since what a lost node writes is
        refused. Had others begun with one that is reported later, they would not wait for it.
        """
        found = str(self._client.count(_batches(evaluation, share))).encode()
        self._client.set(begin_key(evaluation, epoch, share), found)

    def first_batch(self, evaluation: Evaluation, epoch: int, share: Share) -> int:
        """With which global batch they begin; it was told.

        Raises:
            EpochEnded: it was, but all go back to a checkpoint, so that it counts no more.
        """
        value = self._client.get(begin_key(evaluation, epoch, share))
        if value is None:
            raise EpochEnded
        return int(value)

    def report(self, evaluation: Evaluation, share: Share, batch: int, reports: Reports) -> None:
        """Tell what a global batch has reported."""
        key = batch_key(evaluation, share, batch)
        self._client.compare_set(key, None, reports_to_json(reports).encode())

    def reports(self, evaluation: Evaluation, shares: Sequence[Share], batch: int) -> Reports:
        """What all pipelines have told of a global batch; they all have."""
        values = [self._client.get(batch_key(evaluation, share, batch)) for share in shares]
        return reports_from_json(value for value in values if value is not None)

    def await_key(
        self, key: str, seconds: float, must_leave: Callable[[], bool], what: str
    ) -> None:
        """Wait until something was told.

        Raises:
            EpochEnded: a new plan came first.
            DeadlineExceeded: it was not told in time.
        """
        until = time.monotonic() + seconds
        while not self._has(key):
            if must_leave():
                raise EpochEnded
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{what} was not there in {seconds:.0f} s")

    def forget(self, step: int) -> None:
        """Forget the batches of an evaluation after a step; a later step has passed."""
        self._client.delete_prefix(_prefix(step))

    def _has(self, key: str) -> bool:
        try:
            self._client.wait([key], _SLICE_SECONDS)
        except StoreTimeout:
            return False
        return True


def _prefix(step: int) -> str:
    return f"evaluation/{step}/"


def _batches(evaluation: Evaluation, share: Share) -> str:
    return f"{_prefix(evaluation.step)}{evaluation.kind}/batches/{share}/"
