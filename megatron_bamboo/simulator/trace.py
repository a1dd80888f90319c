"""Traces of spot nodes: when nodes came and were taken.

Two formats are read, those in which the papers' traces are published:

    milliseconds,add or remove,node     the node that came or was taken
    date, time, number of nodes         how many there were; which were taken is drawn by name

In the second one rows may be dated before the one above: they count from its time. Of a trace a
part can be taken, by time and by number of nodes.
"""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from itertools import groupby, pairwise

from megatron_bamboo.membership.lives import next_life

HOUR = 3600.0


@dataclass(frozen=True, slots=True)
class Moment:
    """What happens at one time."""

    seconds: float
    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Trace:
    """Who is there at the beginning, and what happens from then on, in order of time."""

    present: tuple[str, ...]
    moments: tuple[Moment, ...]
    seconds: float
    """How long it is."""

    @property
    def num_added(self) -> int:
        """Nodes that come after the beginning."""
        return sum(len(moment.added) for moment in self.moments)

    @property
    def num_removed(self) -> int:
        """Nodes that are taken."""
        return sum(len(moment.removed) for moment in self.moments)

    def counts(self) -> Iterator[tuple[float, int]]:
        """How many nodes there are, from each time on at which that may change."""
        number = len(self.present)
        yield 0.0, number
        for moment in self.moments:
            number += len(moment.added) - len(moment.removed)
            yield moment.seconds, number

    @property
    def node_seconds(self) -> float:
        """The times of all nodes together."""
        counts = [*self.counts(), (self.seconds, 0)]
        return sum(n * (end - start) for (start, n), (end, _) in pairwise(counts))

    def window(self, start: float, seconds: float | None = None) -> "Trace":
        """The part from a time on, its own times beginning with 0.

        Args:
            seconds: how long; to the end if not given or if the trace ends before.

        Raises:
            ValueError: nothing of the trace is in it.
        """
        end = self.seconds if seconds is None else min(self.seconds, start + seconds)
        if not 0 <= start < end:
            raise ValueError(
                f"the trace has {self.seconds / HOUR:.6g} hours: none of it is in the "
                f"{'rest' if seconds is None else f'{seconds / HOUR:.6g} hours'} from hour "
                f"{start / HOUR:.6g} on"
            )
        alive = list(self.present)
        for moment in self.moments:
            if moment.seconds <= start:
                alive += moment.added
                alive = [node for node in alive if node not in moment.removed]
        moments = tuple(
            Moment(moment.seconds - start, moment.added, moment.removed)
            for moment in self.moments
            if start < moment.seconds and (moment.seconds < end or end == self.seconds)
        )
        return Trace(tuple(alive), moments, end - start)

    def at_most(self, num_nodes: int) -> "Trace":
        """The same trace of some of its nodes, so many at most at a time.

        Which ones is drawn by name, so that the nodes left out are of all times and kinds. Each
        node in turn is taken in unless that would be one too many at some time.
        """
        kept: set[str] = set()
        everyone = {*self.present, *(node for m in self.moments for node in m.added)}
        for node in sorted(everyone, key=_lot):
            if self._only(kept | {node})._most() <= num_nodes:
                kept.add(node)
        return self._only(kept)

    def _only(self, kept: set[str]) -> "Trace":
        def among(nodes: Sequence[str]) -> tuple[str, ...]:
            return tuple(node for node in nodes if node in kept)

        moments = (Moment(m.seconds, among(m.added), among(m.removed)) for m in self.moments)
        happening = tuple(m for m in moments if m.added or m.removed)
        return Trace(among(self.present), happening, self.seconds)

    def _most(self) -> int:
        return max(number for _, number in self.counts())


def read_trace(text: str) -> Trace:
    """The trace that a text holds.

    Raises:
        ValueError: naming the line that is none of a trace.
    """
    lines = [(n, line.strip()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError("there is no row in it")
    rows = [(number, [part.strip() for part in line.split(",")]) for number, line in lines]
    is_named = len(rows[0][1]) == 3 and rows[0][1][1] in ("add", "remove")
    changes, end = _named(rows) if is_named else _counted(rows)
    moments = tuple(
        Moment(seconds, *_sides([(is_added, node) for _, is_added, node in group]))
        for seconds, group in groupby(changes, key=lambda change: change[0])
    )
    if moments and moments[0].seconds == 0:
        return Trace(moments[0].added, moments[1:], end)
    return Trace((), moments, end)


_Rows = Sequence[tuple[int, list[str]]]
_Change = tuple[float, bool, str]
"""When, whether a node has come, and which."""


def _sides(changes: Sequence[tuple[bool, str]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    added = tuple(node for is_added, node in changes if is_added)
    return added, tuple(node for is_added, node in changes if not is_added)


def _named(rows: _Rows) -> tuple[list[_Change], float]:
    changes: list[_Change] = []
    newest: dict[str, str] = {}
    """By machine the name of its newest life."""
    alive: set[str] = set()
    last = 0.0
    for number, row in rows:
        seconds, is_added, machine = _named_row(number, row)
        if seconds < last:
            raise ValueError(f"line {number} is earlier than the one above it")
        last = seconds
        if (machine in alive) == is_added:
            wrong = "adds it, and it is there" if is_added else "removes it, and it is not there"
            raise ValueError(f"line {number} is of {machine}: it {wrong}")
        if is_added:
            newest[machine] = next_life(newest[machine]) if machine in newest else machine
        alive ^= {machine}
        changes.append((seconds, is_added, newest[machine]))
    return changes, last


def _counted(rows: _Rows) -> tuple[list[_Change], float]:
    changes: list[_Change] = []
    alive: list[str] = []
    named = 0
    start = last = _counted_row(*rows[0])[0]
    for number, row in rows:
        moment, count = _counted_row(number, row)
        last = max(last, moment)
        seconds = (last - start).total_seconds()
        while len(alive) < count:
            named += 1
            alive.append(f"node{named}")
            changes.append((seconds, True, alive[-1]))
        for node in sorted(alive, key=_lot)[: len(alive) - count]:
            alive.remove(node)
            changes.append((seconds, False, node))
    return changes, (last - start).total_seconds()


def _named_row(number: int, row: list[str]) -> tuple[float, bool, str]:
    if len(row) != 3 or not row[0].isdecimal() or row[1] not in ("add", "remove") or not row[2]:
        raise _no_row(number, row)
    return int(row[0]) / 1000, row[1] == "add", row[2]


def _counted_row(number: int, row: list[str]) -> tuple[datetime, int]:
    if len(row) != 3 or not row[2].isdecimal():
        raise _no_row(number, row)
    try:
        return datetime.strptime(f"{row[0]} {row[1]}", "%Y-%m-%d %H:%M:%S"), int(row[2])
    except ValueError as error:
        raise _no_row(number, row) from error


def _no_row(number: int, row: list[str]) -> ValueError:
    return ValueError(
        f"line {number} is {','.join(row)[:60]}: all rows are `milliseconds,add or remove,node`, "
        "or all are `date, time, number of nodes`"
    )


def _lot(node: str) -> str:
    """What is drawn for a node: the same wherever it is asked."""
    return hashlib.blake2b(node.encode(), digest_size=8).hexdigest()
