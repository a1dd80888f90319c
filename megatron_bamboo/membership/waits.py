"""What a worker waits for, as it shows its agent and as the coordinator hears it.

A wait names whoever has to act first. Beside it stands what the worker has sent itself before it
began to wait: of two that wait for each other, one may so be known to have done its part long ago.
"""

from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_bamboo.schedule.actions import Action, Op

_Kind = tuple[str, int, int | None, Op]


@dataclass(frozen=True, slots=True)
class Sent:
    """Messages of one kind to one worker, in one step, of microbatches that follow each other."""

    peer: str
    step: int
    first: str
    """The receive action of the first of them."""
    number: int = 1

    def includes(self, peer: str, step: int, receive: Action) -> bool:
        """Whether one of them is what a worker waits for in a step."""
        if (peer, step) != (self.peer, self.step):
            return False
        first = Action.parse(self.first)
        if (receive.stage, receive.chunk, receive.op) != (first.stage, first.chunk, first.op):
            return False
        return 0 <= _place(receive) - _place(first) < self.number


class SentLog:
    """What a worker has sent in its newest step."""

    def __init__(self) -> None:
        self._step = 0
        self._runs: dict[_Kind, list[tuple[Action, int]]] = {}

    def note(self, peer: str, step: int, receive: Action) -> None:
        """A message that ``receive`` waits for was handed over."""
        if step < self._step:
            return
        if step > self._step:
            self._step, self._runs = step, {}
        runs = self._runs.setdefault((peer, receive.stage, receive.chunk, receive.op), [])
        if runs and _place(receive) == _place(runs[-1][0]) + runs[-1][1]:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((receive, 1))

    def forget(self, peers: Collection[str]) -> None:
        """What some workers were sent counts for nothing any more."""
        self._runs = {kind: runs for kind, runs in self._runs.items() if kind[0] not in peers}

    def sent(self) -> tuple[Sent, ...]:
        """All that was sent in the newest step."""
        return tuple(
            Sent(peer, self._step, str(first), number)
            for (peer, *_), runs in self._runs.items()
            for first, number in runs
        )


def _place(action: Action) -> int:
    return action.microbatch or 0


@dataclass(frozen=True, slots=True)
class Waiting:
    """What a worker shows of a wait beside its place."""

    awaits: tuple[str, ...]
    """The workers that have to act first."""
    sent: tuple[Sent, ...] = ()
    """What it has sent before."""

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The same from the fields that JSON gives back."""
        return cls(tuple(values["awaits"]), tuple(Sent(**sent) for sent in values["sent"]))


@dataclass(frozen=True, slots=True)
class Wait:
    """A worker's wait, as its agent has seen it."""

    worker: str
    number: int
    """Grows with each place of the worker."""
    step: int
    action: str
    waiting: Waiting
    seconds: float
    """How long it has lasted."""
    limit_seconds: float
    """How long one of its kind may last once all others have done their part."""

    def to_fields(self) -> dict[str, Any]:
        """What JSON can carry."""
        return asdict(self)

    @classmethod
    def from_fields(cls, values: Mapping[str, Any]) -> Self:
        """The wait that ``to_fields`` gave."""
        return cls(**{**values, "waiting": Waiting.from_fields(values["waiting"])})
