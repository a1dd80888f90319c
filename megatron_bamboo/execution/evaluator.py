"""One worker's part in evaluations, which outlive losses as steps do.

An evaluation comes between two steps, and nobody goes on before its outcome is in the store: under
``evaluated/<step>/<kind>``, written once, so that it is the same for all. Until then no state
changes. So nothing is redundant in it, and nothing that is under way is worth anything after a
loss: the attempt is given up and another begun under the new plan, by whoever runs the stages then,
from the first global batch on that its pipeline has not reported (``evaluation_attempt.py``).
"""

import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from megatron_bamboo.evaluation.due import Evaluation, EvaluationPlan
from megatron_bamboo.evaluation.outcome import Evaluated, mean_losses
from megatron_bamboo.execution.errors import EpochEnded
from megatron_bamboo.execution.evaluation_attempt import Attempt, EvaluatorParts
from megatron_bamboo.execution.evaluation_store import Share, batch_key, outcome_key
from megatron_bamboo.membership.place import EVALUATE
from megatron_bamboo.planner.plan import Plan


class Follower(Protocol):
    """Who knows the plan: the executor."""

    def follow_plans(self) -> Plan:
        """Act upon the plans that wait; the plan then in force."""

    def has_pending_plan(self) -> bool:
        """Whether a plan waits."""


class Evaluator:
    """Takes part in a run's evaluations.

    Args:
        plan: which there are.
    """

    def __init__(self, own: EvaluatorParts, plan: EvaluationPlan, follower: Follower) -> None:
        self._own = own
        self._plan = plan
        self._follower = follower

    def wake(self) -> None:
        """Let the main thread look whether it must leave; called from the control thread."""
        self._own.mailbox.wake()

    def after_step(self, step: int) -> None:
        """What is due after a step while the training goes on."""
        for evaluation in self._plan.after_step(step):
            self._evaluate(evaluation)

    def after_training(self) -> None:
        """What is due after the last step."""
        for evaluation in self._plan.after_training(self._own.data.has_test):
            self._evaluate(evaluation)

    def _evaluate(self, evaluation: Evaluation) -> None:
        """Take part until the outcome is known.

        Raises:
            LetGo: this node's part in the job is done.
            DeadlineExceeded: somebody did not do its part in time.
        """
        began, store = time.monotonic(), self._own.store
        with self._own.parts.where.at(evaluation.step, EVALUATE):
            while (outcome := store.outcome(evaluation)) is None:
                epoch = self._follower.follow_plans().epoch
                with suppress(EpochEnded):
                    self._attempt(evaluation, epoch, began)
        self._own.parts.events.emit(
            "evaluated",
            step=evaluation.step,
            kind=evaluation.kind,
            epoch=outcome.epoch,
            losses=dict(outcome.losses),
        )

    def _attempt(self, evaluation: Evaluation, epoch: int, began: float) -> None:
        """Do this worker's part under one plan; return at the outcome."""
        must_leave = self._follower.has_pending_plan
        if self._own.view.shape.num_microbatches:
            Attempt(self._own, evaluation, epoch, must_leave).run()
        if self._own.tells and self._own.view.is_first:
            self._conclude(evaluation, epoch, began, must_leave)
        else:
            self._await(outcome_key(evaluation), evaluation, must_leave)

    def _conclude(
        self, evaluation: Evaluation, epoch: int, began: float, must_leave: Callable[[], bool]
    ) -> None:
        """Sum up what all pipelines have reported, and tell everyone."""
        store, microbatches = self._own.store, self._own.view.arrangement.microbatches
        times = store.num_restores()
        shares = [Share(microbatches, n, times) for n, share in enumerate(microbatches) if share]
        for share in shares:
            last = batch_key(evaluation, share, evaluation.num_batches - 1)
            self._await(last, evaluation, must_leave)
        batches = [store.reports(evaluation, shares, n) for n in range(evaluation.num_batches)]
        seconds, losses = time.monotonic() - began, mean_losses(batches)
        told = Evaluated(evaluation.step, evaluation.kind, epoch, seconds, losses)
        store.tell_outcome(evaluation, told)
        if self._plan.interval is not None:  # nobody is left in the one before
            store.forget(evaluation.step - self._plan.interval)

    def _await(self, key: str, evaluation: Evaluation, must_leave: Callable[[], bool]) -> None:
        """Wait for what others tell, as long as all global batches may take them."""
        parts = self._own.parts
        seconds = parts.wait_seconds * (evaluation.num_batches + 1)
        with parts.where.at(evaluation.step, EVALUATE, "the others"):
            self._own.store.await_key(key, seconds, must_leave, f"the end of {evaluation}")
