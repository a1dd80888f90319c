"""What the time of a run went into, piece by piece."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum


class Kind(StrEnum):
    """What a time is spent on."""

    TRAINING = "training"  # iterations that count in the end
    LOST = "lost"  # iterations, or parts of one, that had to be done again
    TAKEOVER = "takeover"  # by what iterations with takeovers were longer
    RECONFIGURATION = "reconfiguration"  # all wait for other pipelines
    RESTORE = "restore"  # all start, from a checkpoint if there is one
    SAVING = "saving"  # all wait for a checkpoint
    WAIT = "wait"  # too few nodes are there


@dataclass(frozen=True, slots=True)
class Piece:
    """A time without a break."""

    kind: Kind
    start: float
    end: float
    first: int = 0
    """Of the steps that are trained in it; 0: none is."""
    last: int = 0

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start

    def goes_on_in(self, other: "Piece") -> bool:
        """Whether the next piece is more of the same."""
        return self.kind is other.kind and (
            other.first == self.last or (other.first == self.last + 1 and self.first > 0)
        )


def joined(pieces: Iterable[Piece]) -> tuple[Piece, ...]:
    """The same time in as few pieces as can be."""
    found: list[Piece] = []
    for piece in pieces:
        if piece.start == piece.end:
            continue
        if found and found[-1].goes_on_in(piece):
            found[-1] = replace(found[-1], end=piece.end, last=piece.last)
        else:
            found.append(piece)
    return tuple(found)


def totals(pieces: Iterable[Piece]) -> Mapping[Kind, float]:
    """By kind its seconds, in the order of the kinds."""
    seconds = dict.fromkeys(Kind, 0.0)
    for piece in pieces:
        seconds[piece.kind] += piece.seconds
    return seconds
