"""Follows the epochs from a thread of its own, so that a busy or blocked worker still answers.

When the coordinator announces a loss, this thread leaves the commit for good, ends the groups that
the lost nodes were in, writes this worker's record once, publishes its progress if its pipeline
was hit, and fetches the next plan. The main thread acts on the plan between two actions.
"""

import contextlib
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from megatron_bamboo.execution.errors import DeadlineExceeded
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.membership.store_client import StoreClient, StoreError, StoreTimeout
from megatron_bamboo.membership.workers import node_of, workers_of
from megatron_bamboo.planner.plan import Plan
from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.takeover import Progress

logger = logging.getLogger(__name__)

FAILED_STATUS = 1
FENCED_STATUS = 75
STORE_LOST_STATUS = 76
_POLL_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class StepProgress:
    """A worker's progress and the step that it belongs to."""

    step: int
    progress: Progress
    attempt: int = 0
    """The epoch in which the step was begun anew; 0: it was not."""

    def to_json(self) -> str:
        """The value of ``progress/<epoch>/<node>``."""
        return json.dumps(
            {
                "step": self.step,
                "attempt": self.attempt,
                "done": [str(action) for action in sorted(self.progress.done)],
                "received": [str(action) for action in sorted(self.progress.received)],
            }
        )

    @classmethod
    def from_json(cls, text: bytes) -> "StepProgress":
        """The progress that ``to_json`` wrote."""
        values = json.loads(text)
        done, received = (
            frozenset(Action.parse(word) for word in values[name]) for name in ("done", "received")
        )
        return cls(int(values["step"]), Progress(done, received), int(values["attempt"]))


def common_progress(published: Sequence[StepProgress]) -> StepProgress:
    """What workers that share layers have all done: none may skip what another still needs.

    Where some have begun the next step, or this one anew, nothing of it is done by all.
    """
    newest = max((made.step, made.attempt) for made in published)
    made = [one.progress if (one.step, one.attempt) == newest else Progress() for one in published]
    done = frozenset.intersection(*(one.done for one in made))
    received = frozenset.intersection(*(one.received for one in made))
    step, attempt = newest
    return StepProgress(step, Progress(done, received), attempt)


@dataclass(frozen=True, slots=True)
class Handlers:
    """What the control thread asks of the rest of the worker."""

    leave_groups: Callable[[int, Collection[str]], None]  # the epoch left, and who is lost
    progress: Callable[[], StepProgress]
    read_plan: Callable[[bytes], Plan]
    wake: Callable[[], None]
    prepare: Callable[[Plan], None]  # what the main thread need not do itself, which may compute
    failed: Callable[[Exception], None]  # says what ends the worker, if it is this thread


class EpochWatch:
    """The plan in force and, from another thread, the next one."""

    def __init__(
        self,
        client: StoreClient,
        worker: str,
        tensor_size: int,
        plan: Plan,
        ledger: CommitLedger,
        handlers: Handlers,
    ) -> None:
        self._client = client
        self._worker = worker
        self._tensor_size = tensor_size
        self._ledger = ledger
        self._handlers = handlers
        self._condition = threading.Condition()
        self._preparing = threading.Lock()
        self._progress: dict[str, StepProgress] = {}  # by key; a key is written once
        self._pending: list[Plan] = []
        self._newest = plan
        self._closed = False
        self.ended_at = 0.0
        """When the newest loss was announced, on the monotonic clock."""
        self._thread = threading.Thread(target=self._run, name="epochs", daemon=True)

    def start(self) -> None:
        """Begin to follow the epochs."""
        self._thread.start()

    def has_pending(self) -> bool:
        """Whether a plan waits to be acted upon."""
        return bool(self._pending)

    def take_pending(self) -> Plan:
        """The oldest plan that has not been acted upon, prepared."""
        with self._preparing, self._condition:
            return self._pending.pop(0)

    def wait_for_plan(self, seconds: float, why: str) -> None:
        """Wait until a new plan is there.

        Raises:
            DeadlineExceeded: nobody said within the time that a node is lost.
        """
        deadline = time.monotonic() + seconds
        with self._condition:
            while not self._pending:
                left = deadline - time.monotonic()
                if left <= 0 or not self._condition.wait(left):
                    raise DeadlineExceeded(
                        f"{why}, but no node was declared lost in {seconds:.0f} s "
                        f"(epoch {self._newest.epoch})"
                    )

    def progress_of(self, epoch: int, worker: str, seconds: float) -> StepProgress | None:
        """What the workers of a surviving node had all done when an epoch ended.

        None if the node was lost before they could publish it, or is done with the training: then
        no step is under way any more.

        Raises:
            DeadlineExceeded: it neither published nor was declared lost.
        """
        deadline = time.monotonic() + seconds
        published = []
        for one in workers_of([node_of(worker)], self._tensor_size):
            progress = self._published(f"progress/{epoch}/{one}", worker, deadline)
            if progress is None:
                return None
            published.append(progress)
        return common_progress(published)

    def _published(self, key: str, worker: str, deadline: float) -> StepProgress | None:
        while time.monotonic() < deadline:
            if (known := self._progress.get(key)) is not None:
                return known
            value = self._client.get(key)
            if value is not None:
                return self._progress.setdefault(key, StepProgress.from_json(value))
            if any(worker in plan.lost for plan in list(self._pending)):
                return None
            if self._client.get(f"done/{worker}") is not None:
                return None
            with contextlib.suppress(StoreTimeout):
                self._client.wait([key], timeout_seconds=0.1)
        raise DeadlineExceeded(f"{worker} did not publish {key}")

    def close(self) -> None:
        """Stop following; the training is over."""
        self._closed = True

    def _run(self) -> None:
        try:
            while not self._closed:
                self._follow_one()
        except (StoreError, StoreTimeout) as error:
            # Without the store nobody knows whether this worker still belongs to the job.
            if not self._closed:
                self._exit(STORE_LOST_STATUS, f"the store is lost: {error}")
        # Whatever it is: without this thread nobody would release the main thread at a loss.
        except Exception as error:
            logger.exception("%s: the control thread failed", self._worker)
            self._handlers.failed(error)
            os._exit(FAILED_STATUS)

    def _follow_one(self) -> None:
        epoch = self._newest.epoch
        try:
            announced = self._client.wait_change(f"ending/{epoch}", None, _POLL_SECONDS)
        except StoreTimeout:
            return  # the store, or the way to it, may be away for a while
        if announced is None:
            return
        self.ended_at = time.monotonic()
        lost = workers_of(json.loads(announced)["lost"], self._tensor_size)
        self._leave(epoch, lost)
        published = self._client.wait_change(f"plan/{epoch + 1}", None)
        if published is None:
            seconds = self._client.deadline_seconds
            raise StoreTimeout(f"plan/{epoch + 1} was not published within {seconds:g} s")
        plan = self._handlers.read_plan(published)
        if self._worker in plan.lost:
            self._exit(FENCED_STATUS, f"this node was declared lost in epoch {plan.epoch}")
        # A node that was declared lost while records were gathered is in no announcement.
        self._handlers.leave_groups(epoch, workers_of(map(node_of, plan.lost), self._tensor_size))
        # What follows a plan by which all begin again is another watch's to follow.
        self._closed = self._closed or (plan.restored is not None and self._worker in plan.nodes)
        self._ledger.decide(plan.decision)
        with self._preparing:
            with self._condition:
                self._newest = plan
                self._pending.append(plan)
                self._condition.notify_all()
            self._handlers.wake()
            self._handlers.prepare(plan)
        self._forget_progress()

    def _forget_progress(self) -> None:
        """Only of the epochs whose ends are still to be acted upon anything will be asked."""
        with self._condition:
            oldest = min((plan.epoch for plan in self._pending), default=self._newest.epoch)
        for key in [key for key in list(self._progress) if int(key.split("/")[1]) < oldest - 1]:
            self._progress.pop(key, None)

    def _leave(self, epoch: int, lost: Collection[str]) -> None:
        record = self._ledger.leave(epoch).to_json().encode()
        self._handlers.leave_groups(epoch, lost)
        # Progress first: who reads the plan, which needs every record, finds all progress there.
        self._client.set(
            f"progress/{epoch}/{self._worker}", self._handlers.progress().to_json().encode()
        )
        held = self._client.compare_set(f"record/{epoch}/{self._worker}", None, record)
        if held != record:
            self._exit(FENCED_STATUS, f"this node was fenced in epoch {epoch}")

    def _exit(self, status: int, reason: str) -> None:
        """End at once, without applying or writing anything more."""
        logger.error("%s: %s", self._worker, reason)
        os._exit(status)
