"""A fault on purpose: when it strikes a worker, and how. ``bamboo run --inject`` takes these.

It strikes in the worker itself, just before an action, so that the same fault can be had again.
"""

import re
from dataclasses import dataclass
from enum import StrEnum
from typing import Self

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.schedule.actions import COMPUTE_OPS, Action, Op


class How(StrEnum):
    """What happens to the worker or its node."""

    KILL = "kill"
    """The whole node is killed."""
    KILL_WORKER = "kill-worker"
    """The worker's process is killed."""
    KILL_AGENT = "kill-agent"
    """The node's agent is killed, and its workers live."""
    STOP = "stop"
    """The whole node is stopped: no connection closes, and it may wake again."""
    STOP_WORKER = "stop-worker"
    """The worker's process is stopped."""
    STOP_AGENT = "stop-agent"
    """The node's agent is stopped, and its workers run on."""
    CUT = "cut"
    """The node's network is cut: what is sent from or to it is lost, and no connection closes. All
    nodes of the job then have networks of their own (``rehearsal/networks.py``)."""
    RAISE = "raise"
    """The worker raises an error."""
    EXIT = "exit"
    """The worker ends with status 0, before the training is over."""
    HANG = "hang"
    """The worker's main thread stays in a forward or backward: in this action or the next such."""
    FLIP = "flip"
    """A bit flips in what the worker has of a unit's state, and it goes on."""


REPLICA = "replica"
"""In the place of a unit: the first one of which the worker holds a replica, when it holds any."""

LOSSES = tuple(how for how in How if how is not How.FLIP)
"""What costs the job a node."""

EVALUATION_OPS = frozenset({Op.F, Op.SEND_F, Op.RECV_F})
"""All that an evaluation has."""


@dataclass(frozen=True, slots=True)
class Nth:
    """The n-th action that a worker begins in a step; where there are fewer, its first of the
    next."""

    number: int

    def __str__(self) -> str:
        return f"#{self.number}"


@dataclass(frozen=True, slots=True)
class EvaluationMoment:
    """An action of the evaluation after a step, in one of its global batches, from 1."""

    batch: int
    action: Action

    def __str__(self) -> str:
        return f"EVAL{self.batch}/{self.action}"


Moment = Action | SaveMoment | Nth | EvaluationMoment


@dataclass(frozen=True, slots=True)
class Fault:
    """When and how a worker is struck."""

    step: int | None
    """None: the first step in which the worker's plan has state move. Which one that is depends on
    when a loss was found, and it may be one whose forwards and backwards are done already."""
    moment: Moment
    how: How = How.KILL
    what: str = ""
    """With a flip: the unit and the kind of its state, like ``layer1/exp_avg``, or
    ``replica/exp_avg``."""

    @classmethod
    def parse(cls, text: str) -> Self:
        """From ``iter7:2.0B3``, ``iter7:#12:raise``, ``change:1SEND_STATE``, ``iter10:EVAL1/2.0F3``
        or ``iter7:1REDUCE:flip:layer1/exp_avg``.

        Raises:
            ValueError: it is no fault.
        """
        found = re.fullmatch(r"(?:iter([1-9][0-9]*)|change):([^:]*)(?::([^:]*))?(?::(.*))?", text)
        if found is None:
            raise ValueError(
                "write NODE@iterN:ACTION, like node5@iter7:2.0B3, or NODE@change:ACTION"
            )
        step, moment, how, what = found.groups()
        number = None if step is None else int(step)
        return cls(number, parse_moment(moment), _parse_how(how or How.KILL), what or "")

    def __post_init__(self) -> None:
        if (self.how is How.FLIP) != bool(re.fullmatch("[^/]+/[^/]+", self.what)):
            raise ValueError(
                "a flip, and nothing else, says in which state: flip:UNIT/KIND, like "
                "flip:layer1/parameter or flip:layer1/exp_avg"
            )
        if isinstance(self.moment, SaveMoment) and self.how not in (How.KILL, How.STOP):
            raise ValueError(f"at {self.moment} a node is killed or stopped whole, not {self.how}")
        if isinstance(self.moment, SaveMoment) and self.step is None:
            raise ValueError(f"{self.moment} needs the iteration that is saved: write iterN")
        if isinstance(self.moment, EvaluationMoment) and self.step is None:
            raise ValueError(f"{self.moment} needs the iteration before it: write iterN")
        if isinstance(self.moment, EvaluationMoment) and self.how is How.FLIP:
            raise ValueError("a bit flips in an iteration, not in an evaluation")
        action = self.moment
        if isinstance(action, EvaluationMoment):
            action = action.action
        is_compute = isinstance(action, Nth) or (
            isinstance(action, Action) and action.op in COMPUTE_OPS
        )
        if self.how is How.HANG and not is_compute:
            raise ValueError(f"a worker hangs in a forward or backward, not at {self.moment}")

    @property
    def hits_replica(self) -> bool:
        """Whether a bit flips in a replica, whichever it is."""
        return self.what.startswith(f"{REPLICA}/")

    def __str__(self) -> str:
        step = "change" if self.step is None else f"iter{self.step}"
        text = f"{step}:{self.moment}"
        text = text if self.how is How.KILL else f"{text}:{self.how}"
        return f"{text}:{self.what}" if self.what else text


def parse_moment(text: str) -> Moment:
    """An action, one of an evaluation, a moment of a save, or the number of an action, from its
    text.

    Raises:
        ValueError: it is none of them.
    """
    if text in tuple(SaveMoment):
        return SaveMoment(text)
    if number := re.fullmatch(r"#([1-9][0-9]*)", text):
        return Nth(int(number[1]))
    if found := re.fullmatch(r"EVAL([1-9][0-9]*)/(.*)", text):
        action = Action.parse(found[2])
        if action.op not in EVALUATION_OPS:
            raise ValueError(f"an evaluation has no {action.op}")
        return EvaluationMoment(int(found[1]), action)
    return Action.parse(text)


def _parse_how(text: str) -> How:
    try:
        return How(text)
    except ValueError:
        raise ValueError(f"{text!r} is none of {', '.join(How)}") from None
