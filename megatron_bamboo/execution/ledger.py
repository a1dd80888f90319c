"""What this worker has done about the newest step's commit, and its leaving of an epoch.

The main thread enters and passes commits; the control thread leaves the epoch when a loss is
announced. Between them lies the one question that must have one answer for ever: did this worker
pass the commit? So leaving shuts the commit group's sockets and waits until the main thread is out
of the collective, one way or the other, before it says what happened.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megatron_bamboo.execution.commit import from_hex, to_hex
from megatron_bamboo.execution.errors import EpochEnded
from megatron_bamboo.membership.decision import Record, StepDecision


@dataclass(slots=True)
class _LastCommit:
    step: int
    entered: bool = False
    vector: tuple[float, ...] | None = None  # not None: passed
    epoch: int | None = None  # in whose collective; None where a decision says that it is passed


class CommitLedger:
    """Guards the commits of one worker."""

    def __init__(self, node: str) -> None:
        self._node = node
        self._condition = threading.Condition()
        self._last = _LastCommit(step=0)
        self._epoch = 0  # the main thread acts by this epoch's plan
        self._left_epoch = -1  # the newest epoch that was left
        self._release: Callable[[], None] | None = None  # set while in the collective
        self._gathered = 0

    def commit(
        self,
        step: int,
        collective: Callable[[], Sequence[float]],
        release: Callable[[], None],
    ) -> None:
        """Enter the commit of a step, run the collective, and pass with its result.

        Args:
            collective: the sum over all live workers of the commit vector.
            release: ends the collective from another thread.

        Raises:
            EpochEnded: the epoch was left before this worker could enter.
            PeerLost: the collective failed.
        """
        with self._condition:
            if self._left_epoch >= self._epoch:
                raise EpochEnded
            self._last = _LastCommit(step, entered=True, epoch=self._epoch)
            self._release = release
        vector: tuple[float, ...] | None = None
        try:
            vector = tuple(collective())
        finally:
            with self._condition:
                self._last.vector = vector
                self._release = None
                self._condition.notify_all()

    def leave(self, epoch: int) -> Record:
        """Leave an epoch for good; the record of what this worker did by its end."""
        with self._condition:
            self._left_epoch = epoch
            if self._release is not None:
                self._release()
            while self._release is not None:
                self._condition.wait()
            last = self._last
            vector = None if last.vector is None else to_hex(last.vector)
            passed = vector is not None
            return Record(self._node, last.step, last.entered, passed, vector, self._gathered)

    def decide(self, decision: StepDecision | None) -> None:
        """Take a plan's decision: the vector that was handed over, or that the step is open.

        At once, and not when the main thread comes to follow the plan: the record of the next
        epoch must say what was decided in this one.
        """
        with self._condition:
            if decision is None or decision.step != self._last.step:
                return
            if decision.applied and self._last.vector is None:
                assert decision.vector is not None
                self._last = _LastCommit(decision.step, True, from_hex(decision.vector))
            elif not decision.applied:
                assert self._last.vector is None, "a passed step was declared not applied"
                self._last = _LastCommit(decision.step)

    def follow(self, epoch: int) -> None:
        """The main thread acts by this epoch's plan from now on."""
        with self._condition:
            self._epoch = epoch

    @property
    def gathered(self) -> int:
        """The last step after which this worker has all parameters of what it holds."""
        with self._condition:
            return self._gathered

    def note_gathered(self, step: int) -> None:
        """All parameters are there as they are after a step; or only those of the one before."""
        with self._condition:
            self._gathered = step

    def passed_vector(self, step: int) -> tuple[float, ...] | None:
        """The vector of a step whose commit this worker passed or was handed; None otherwise."""
        with self._condition:
            return self._last.vector if self._last.step == step else None

    def epoch_of(self, step: int) -> int | None:
        """The epoch in whose collective all passed a step; None if this worker did not see that."""
        with self._condition:
            last = self._last
            is_passed = last.step == step and last.vector is not None
            return last.epoch if is_passed else None
