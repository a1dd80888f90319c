"""The save of a step, as all workers go through it without ever waiting for the dead.

A save happens between two steps, and nobody goes on before its outcome is in the store: under
``saved/<step>``, written once, so that it is the same for all. The plan says who writes
(``writers.py``); each writer forks a process that does it (``child.py``) and meanwhile looks for a
new plan. When a node is lost the attempt is given up and begun anew by the writers of the new
plan, with the same state: nobody has changed it. A save that fails for another reason, like a full
disk, has failed for all workers alike.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol, Self

from megatron_bamboo.checkpoint.attempt import SaveAttempt
from megatron_bamboo.checkpoint.child import Task
from megatron_bamboo.checkpoint.moments import BeforeMoment, SaveMoment
from megatron_bamboo.checkpoint.writers import writers_of
from megatron_bamboo.execution.errors import DeadlineExceeded
from megatron_bamboo.membership.keys import Credential
from megatron_bamboo.membership.store_client import StoreClient, StoreTimeout
from megatron_bamboo.planner.plan import Plan

_SLICE_SECONDS = 0.05
# A writer that has lost another one waits for so long to hear why: in a plan, or from that one.
_SETTLE_SECONDS = 10.0
# The lead gives an attempt up at its deadline; this much later the others give up the lead.
_GRACE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class Saved:
    """How a save ended: the value of ``saved/<step>``."""

    step: int
    epoch: int
    folder: str
    seconds: float
    failure: str | None

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The outcome that ``to_json`` wrote."""
        return cls(**json.loads(text))


class Follower(Protocol):
    """Who knows the plan: the executor."""

    def follow_plans(self) -> Plan:
        """Act upon the plans that wait; the plan then in force."""

    def has_pending_plan(self) -> bool:
        """Whether a plan waits."""


@dataclass(frozen=True, slots=True)
class SaverParts:
    """What a saver is made of."""

    root: Path
    worker: str
    tensor_size: int
    client: StoreClient
    store: str
    """The store's address, for the writing process's own client."""
    credential: Credential
    """This worker's."""
    attempt_seconds: float
    """The longest that an attempt may take."""
    sharded: bool
    """Whether the pipelines share the optimizer's state."""
    state_of: Callable[[int, Sequence[int], Sequence[int]], dict[str, Any]]
    """What to write after a step of some stages, and of the shares of others."""
    make_before: Callable[[], BeforeMoment]
    """Makes the fault injection."""


class Saver:
    """One worker's part in saves."""

    def __init__(self, parts: SaverParts) -> None:
        self._parts = parts
        self._before = parts.make_before()

    def save(self, step: int, follower: Follower) -> Saved:
        """Take part in the save of a step until its outcome is known.

        Raises:
            DeadlineExceeded: the lead writer did not say anything in time.
        """
        began = time.monotonic()
        self._before(SaveMoment.BEGIN, step)
        while (outcome := self._outcome(step)) is None:
            plan = follower.follow_plans()
            self._attempt(plan, step, began, follower.has_pending_plan)
        return outcome

    def _attempt(self, plan: Plan, step: int, began: float, must_leave: Callable[[], bool]) -> None:
        """Do this worker's part under one plan; return at the outcome or when a new plan comes."""
        parts = self._parts
        writers = writers_of(plan, parts.tensor_size, parts.sharded)
        what = f"the save of step {step} by {writers.lead} in epoch {plan.epoch}"
        if parts.worker not in writers.workers:
            self._await(step, what, must_leave)
            return
        task = Task(
            root=parts.root,
            step=step,
            epoch=plan.epoch,
            rank=writers.workers.index(parts.worker),
            num_writers=len(writers.workers),
            store=parts.store,
            credential=parts.credential,
            seconds=parts.attempt_seconds,
        )
        stages, shares = writers.stages_of(parts.worker), writers.shares_of(parts.worker)
        attempt = SaveAttempt(task, parts.state_of(step, stages, shares), parts.make_before)
        try:
            if task.is_lead:
                self._lead(attempt, task, began, must_leave)
            else:
                self._await(step, what, must_leave, lambda: self._tell_lead(attempt, task))
        finally:
            attempt.close()

    def _lead(
        self, attempt: SaveAttempt, task: Task, began: float, must_leave: Callable[[], bool]
    ) -> None:
        """Wait for the lead's writing process, and tell everyone how the save ended."""
        client = self._parts.client
        deadline = time.monotonic() + task.seconds
        reason = f"it was not done in {task.seconds:g} s"
        while not must_leave():
            until = deadline
            if attempt.wait(_SLICE_SECONDS):
                failure = attempt.failure
                if failure is None or not failure.by_peer:
                    self._tell(task, began, failure.reason if failure else None)
                    return
                reason = failure.reason
                if client.get(f"ending/{task.epoch}") is None:  # else a plan is on its way
                    until = min(deadline, attempt.ended_at + _SETTLE_SECONDS)
                time.sleep(_SLICE_SECONDS)
            told = client.get(_failure_key(task))
            if told is not None or time.monotonic() > until:
                self._tell(task, began, told.decode() if told else reason)
                return

    def _await(
        self,
        step: int,
        what: str,
        must_leave: Callable[[], bool],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> None:
        """Wait for what the lead says."""
        until = time.monotonic() + self._parts.attempt_seconds + _GRACE_SECONDS
        while not must_leave() and self._outcome(step, _SLICE_SECONDS) is None:
            meanwhile()
            if time.monotonic() > until:
                raise DeadlineExceeded(f"{what} had no outcome in time")

    def _tell_lead(self, attempt: SaveAttempt, task: Task) -> None:
        """Say why this worker's own writing failed; one that only lost another keeps quiet."""
        if attempt.wait(0) and (failure := attempt.failure) and not failure.by_peer:
            reason = f"{self._parts.worker}: {failure.reason}"
            self._parts.client.compare_set(_failure_key(task), None, reason.encode())

    def _tell(self, task: Task, began: float, failure: str | None) -> None:
        """Write the outcome, unless the lead of an earlier epoch has."""
        self._before(SaveMoment.TELL, task.step)
        seconds = time.monotonic() - began
        saved = Saved(task.step, task.epoch, str(task.root), seconds, failure)
        self._parts.client.compare_set(f"saved/{task.step}", None, saved.to_json().encode())
        self._parts.client.delete_prefix(task.prefix)

    def _outcome(self, step: int, seconds: float = 0.0) -> Saved | None:
        """What the store knows of a save, waiting a little for it."""
        key = f"saved/{step}"
        try:
            self._parts.client.wait([key], seconds)
        except StoreTimeout:
            return None
        value = self._parts.client.get(key)
        assert value is not None
        return Saved.from_json(value)


def _failure_key(task: Task) -> str:
    """Where a writer other than the lead says why it failed."""
    return f"{task.prefix}failure"
