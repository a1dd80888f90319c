"""Kinds of losses, by the sign that the coordinator noted: few enough to be a metric's label."""

import re
from enum import StrEnum


class LossKind(StrEnum):
    """What showed that a node was lost."""

    CONNECTION = "connection"
    """Its agent's connection closed: it died at once."""
    SILENCE = "silence"
    """Its lease was over."""
    SIGNAL = "signal"
    """A worker of it was ended by a signal."""
    EXIT = "exit"
    """A worker of it ended by itself."""
    ERROR = "error"
    """A worker of it raised an error."""
    HANG = "hang"
    """A worker of it did not run, or was stuck."""
    LINK = "link"
    """A link to another live node was broken, and it was the one to give up."""
    NO_RECORD = "no_record"
    """It did not answer at another's loss."""
    OTHER = "other"


_SIGNS = (
    ("its connection closed", LossKind.CONNECTION),
    ("nothing was heard of it", LossKind.SILENCE),
    ("its worker was ended by signal", LossKind.SIGNAL),
    ("its worker ended with status", LossKind.EXIT),
    ("its worker raised", LossKind.ERROR),
    ("its worker (did not run|was stuck)", LossKind.HANG),
    ("(the|a) link .*is broken", LossKind.LINK),
    ("it left no record", LossKind.NO_RECORD),
)


def kind_of(cause: str) -> LossKind:
    """The kind of a loss, from its cause as it stands in the store."""
    return next((kind for sign, kind in _SIGNS if re.match(sign, cause)), LossKind.OTHER)
