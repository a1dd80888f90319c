"""The cheapest way to give each row a column of its own: the Hungarian algorithm.

Which node best takes which place of an arrangement is this problem, and it is solved exactly.
Written here because the planner is imported by agents and coordinators, which do without numpy:
costs are Python's integers, so that sums of bytes are exact and several aims can be packed in one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf

Cost = int | float
"""An integer, or ``inf`` where a row may not have a column."""


@dataclass(slots=True)
class _Matching:
    """What is matched so far, and prices that prove that it could not be cheaper."""

    costs: Sequence[Sequence[Cost]]
    row_price: list[Cost]
    column_price: list[Cost]
    row_of: list[int | None]

    def rest(self, row: int, column: int) -> Cost:
        """What a pair costs above its prices: never negative, and 0 for what is matched."""
        return self.costs[row][column] - self.row_price[row] - self.column_price[column]


@dataclass(slots=True)
class _Search:
    """The shortest paths from an unmatched row to columns, by what they cost above the prices."""

    distance: list[Cost]
    row_before: list[int]
    seen: list[int] = field(default_factory=list)


def least_assignment(costs: Sequence[Sequence[Cost]]) -> tuple[int, ...] | None:
    """By row its column, with the least sum of costs; None where no way is allowed.

    Args:
        costs: by row and column; rows may be fewer than columns, never more.
    """
    width = len(costs[0]) if costs else 0
    assert len(costs) <= width or not costs, f"{len(costs)} rows, {width} columns"
    matching = _Matching(costs, [0] * len(costs), [0] * width, [None] * width)
    for row in range(len(costs)):
        if not _add(matching, row):
            return None
    columns = {row: column for column, row in enumerate(matching.row_of) if row is not None}
    return tuple(columns[row] for row in range(len(costs)))


def _add(matching: _Matching, row: int) -> bool:
    """Match one more row, along the shortest path to a free column; False where there is none."""
    width = len(matching.row_of)
    search = _Search([inf] * width, [row] * width)
    unseen = list(range(width))
    reached, length = row, 0
    while True:
        _extend(matching, search, unseen, reached, length)
        # Of equally near columns a free one ends the search at once.
        column = min(unseen, key=lambda c: (search.distance[c], matching.row_of[c] is not None))
        nearest, holder = search.distance[column], matching.row_of[column]
        if nearest == inf:
            return False
        assert isinstance(nearest, int)
        length = nearest
        if holder is None:
            _pay(matching, search, row, length)
            _switch(matching, search, row, column)
            return True
        search.seen.append(column)
        unseen.remove(column)
        reached = holder


def _extend(matching: _Matching, search: _Search, unseen: list[int], row: int, length: int) -> None:
    for column in unseen:
        distance = length + matching.rest(row, column)
        if distance < search.distance[column]:
            search.distance[column] = distance
            search.row_before[column] = row


def _pay(matching: _Matching, search: _Search, row: int, length: int) -> None:
    """Change the prices so that the path found costs nothing above them."""
    matching.row_price[row] += length
    for column in search.seen:
        change = length - search.distance[column]
        holder = matching.row_of[column]
        assert holder is not None
        matching.row_price[holder] += change
        matching.column_price[column] -= change


def _switch(matching: _Matching, search: _Search, row: int, column: int) -> None:
    """Along the path each row takes the column that it leads to, and gives its own away."""
    columns = {holder: c for c, holder in enumerate(matching.row_of) if holder is not None}
    while True:
        before = search.row_before[column]
        matching.row_of[column] = before
        if before == row:
            return
        column = columns[before]
