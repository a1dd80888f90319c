"""Which templates to use: the pipelines that all nodes together make up, fastest first.

Of all multisets of templates with as many nodes as there are and at least f + 1 pipelines, those
are wanted with which the global batch takes the least time by the formula, the microbatches being
split as well as can be (Oobleck, section 4.2.1, which enumerates them all).

Here time is halved instead: with a time given it is known how many microbatches each template can
do, and whether some multiset can do all is a knapsack over the nodes. So the least time is exact,
for a thousand nodes as well. The next best are found with a little more time, until there are
enough; of those that take equally long the ones with short pipelines come first.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import add

from megatron_bamboo.planner.microbatches import Pace, least_time

_IMPOSSIBLE = -(10**15)
"""Microbatches of pipelines that do not exist: whatever is added, it stays below 0."""
_AT_ONCE = 4
"""How many times as many multisets as wanted are looked at."""


@dataclass(frozen=True, slots=True, order=True)
class Multiset:
    """The numbers of nodes of some pipelines, and the time of the slowest in ticks."""

    time: int
    sizes: tuple[int, ...]
    """Ascending."""


class Instantiator:
    """The multisets of templates for one number of nodes.

    Args:
        paces: by the number of nodes of a template how long it takes.
        fault_tolerance: how many pipelines more than one there must be.
        num_microbatches: of the global batch; no pipeline is without one.
    """

    def __init__(
        self,
        paces: Mapping[int, Pace],
        num_nodes: int,
        fault_tolerance: int,
        num_microbatches: int,
    ) -> None:
        self._paces = paces
        self._num_nodes = num_nodes
        self._fewest = fault_tolerance + 1
        self._num_microbatches = num_microbatches
        self._latest = max((pace.time(num_microbatches) for pace in paces.values()), default=0)

    def best(self, wanted: int) -> tuple[Multiset, ...]:
        """So many of the fastest multisets, or all if there are fewer; none if there is none."""
        low = self._least_time()
        if low is None:
            return ()
        found, time, more = self._within(low, wanted), low, max(1, low >> 10)
        few: list[Multiset] = []
        while len(found) < wanted and time < self._latest:
            low, few = time, found
            time, more = min(time + more, self._latest), 2 * more
            found = self._within(time, wanted)
        # Not too many either, or the fastest of them may be left out.
        while len(found) == _AT_ONCE * wanted and low + 1 < time:
            middle = (low + time) // 2
            fewer = self._within(middle, wanted)
            if len(fewer) < wanted:
                low, few = middle, fewer
            else:
                time, found = middle, fewer
        return tuple(sorted({*few, *found})[:wanted])

    def _least_time(self) -> int | None:
        if not self._can(self._latest):
            return None
        low, high = min(pace.time(1) for pace in self._paces.values()), self._latest
        while low < high:
            middle = (low + high) // 2
            if self._can(middle):
                high = middle
            else:
                low = middle + 1
        return low

    def _numbers_within(self, time: int) -> Mapping[int, int]:
        """By size the microbatches that a template can do; those that can do none left out."""
        return {
            size: min(pace.number_within(time), self._num_microbatches)
            for size, pace in self._paces.items()
            if pace.time(1) <= time and pace.most != 0
        }

    def _can(self, time: int) -> bool:
        """Whether some multiset takes no longer."""
        numbers = self._numbers_within(time)
        if not numbers:
            return False
        if self._num_nodes // min(numbers) > self._num_microbatches:
            return any(self._enumerate(numbers))  # there may be too many pipelines
        return _most(numbers, self._num_nodes, self._fewest) >= self._num_microbatches

    def _within(self, time: int, wanted: int) -> list[Multiset]:
        numbers = self._numbers_within(time)
        every = islice(self._enumerate(numbers), _AT_ONCE * wanted)
        return [Multiset(self._time(sizes), sizes) for sizes in every]

    def _time(self, sizes: Sequence[int]) -> int:
        return least_time([self._paces[size] for size in sizes], self._num_microbatches)

    def _enumerate(self, numbers: Mapping[int, int]) -> Iterator[tuple[int, ...]]:
        """The multisets that can do all microbatches, short pipelines first."""
        return _Enumeration(numbers, self._num_nodes, self._fewest, self._num_microbatches).all()


def _most(numbers: Mapping[int, int], num_nodes: int, fewest: int) -> int:
    """The most microbatches that at least ``fewest`` pipelines of all nodes can do."""
    longest, shortest = max(numbers), min(numbers)
    by_size = [numbers.get(size, _IMPOSSIBLE) for size in range(longest, shortest - 1, -1)]
    # By nodes, after as many impossible numbers as the longest template reaches back.
    before = [_IMPOSSIBLE] * longest + [0] + [_IMPOSSIBLE] * num_nodes
    for count in range(1, fewest + 1):
        now = [_IMPOSSIBLE] * (longest + num_nodes + 1)
        for nodes in range(shortest, num_nodes + 1):
            most = max(map(add, before[nodes : nodes + len(by_size)], by_size))
            now[longest + nodes] = most
            if count == fewest:  # or more pipelines than that
                before[longest + nodes] = max(before[longest + nodes], most)
        before = now
    return before[-1]


class _Enumeration:
    """All multisets that can do so many microbatches, without trying in vain.

    A table says by the sizes that may still be used, the pipelines that are still due and the
    nodes that are left, how many microbatches can be done.
    """

    def __init__(
        self, numbers: Mapping[int, int], num_nodes: int, fewest: int, num_microbatches: int
    ) -> None:
        self._kinds = sorted(numbers.items())
        self._num_nodes = num_nodes
        self._fewest = fewest
        self._num_microbatches = num_microbatches
        self._table = self._fill()
        self._in_vain: set[tuple[int, int, int, int]] = set()

    def all(self) -> Iterator[tuple[int, ...]]:
        """Each once, its sizes ascending."""
        return self._choose(len(self._kinds), self._num_nodes, 0, 0, ())

    def _fill(self) -> list[list[list[int]]]:
        nothing = [_IMPOSSIBLE] * (self._num_nodes + 1)
        done = [0, *nothing[1:]]
        table = [[done, *([nothing] * self._fewest)]]
        for size, number in self._kinds:
            rows: list[list[int]] = []
            for due, row in enumerate(table[-1]):
                row = row.copy()
                taken_from = rows[due - 1] if due else row
                for nodes in range(size, self._num_nodes + 1):
                    with_one = taken_from[nodes - size] + number
                    if with_one > row[nodes]:
                        row[nodes] = with_one
                rows.append(row)
            table.append(rows)
        return table

    def _choose(
        self, kinds: int, nodes: int, count: int, done: int, longer: tuple[int, ...]
    ) -> Iterator[tuple[int, ...]]:
        """How many pipelines have the longest of the first so many kinds, few first."""
        if kinds == 0:
            yield longer
            return
        if (kinds, nodes, count, done) in self._in_vain:
            return
        size, number = self._kinds[kinds - 1]
        fruitless = True
        for more in range(nodes // size + 1):
            state = (nodes - more * size, count + more, done + more * number)
            if self._can(kinds - 1, *state):
                for sizes in self._choose(kinds - 1, *state, (size,) * more + longer):
                    fruitless = False
                    yield sizes
        if fruitless:
            self._in_vain.add((kinds, nodes, count, done))

    def _can(self, kinds: int, nodes: int, count: int, done: int) -> bool:
        due = max(0, self._fewest - count)
        most = self._table[kinds][due][nodes]
        if most < 0 or done + most < self._num_microbatches:
            return False
        longest = self._kinds[kinds - 1][0] if kinds else 1
        return count - (-nodes // longest) <= self._num_microbatches
