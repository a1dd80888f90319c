"""The best placement when zones couple the places: branch and bound over assignments.

The cheapest assignment without regard to zones has clashes. For one of them there are these ways:
this place is not in that zone, or that one is not, or all of them are. Each is an assignment
problem again, with fewer zones for some places, and its least cost a bound for all that follows.
Jobs of a dozen nodes are searched out; larger ones keep the best that was found within a limit.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

from megatron_bamboo.planner.assignment import Cost, least_assignment
from megatron_bamboo.planner.places import Clash
from megatron_bamboo.planner.spread import Spread, alternating, improved, penalty, zone_of_all

SEARCH_LIMIT = 1_000_000
"""Cells of cost tables that a search may solve: 15,000 assignments of 8 nodes, or 15 of 256."""

Allowed = tuple[frozenset[str], ...]
"""By place the zones that it may be in."""


@dataclass(frozen=True, slots=True)
class Problem:
    """What each node costs at each place, the zone of each node, and what is to be spread."""

    costs: tuple[tuple[int, ...], ...]
    zone_of: tuple[str, ...]
    spread: Spread

    def solve(self, allowed: Allowed) -> "Answer | None":
        """The cheapest assignment within these zones."""
        costs: list[list[Cost]] = [
            [cost if zone in zones else inf for cost, zone in zip(row, self.zone_of, strict=True)]
            for row, zones in zip(self.costs, allowed, strict=True)
        ]
        columns = least_assignment(costs)
        if columns is None:
            return None
        pattern = [self.zone_of[column] for column in columns]
        cost = sum(self.costs[row][column] for row, column in enumerate(columns))
        return Answer((penalty(self.spread.clashes, pattern), cost), columns, pattern)


@dataclass(frozen=True, slots=True)
class Answer:
    """By place the node's number and its zone; a score is the penalty, then the cost."""

    score: tuple[int, int]
    columns: tuple[int, ...]
    pattern: list[str]


def search(problem: Problem) -> tuple[Answer, bool]:
    """The best answer found, and whether there is none better."""
    anywhere = (frozenset(problem.zone_of),) * len(problem.costs)
    free = problem.solve(anywhere)
    assert free is not None, "there are enough nodes"
    if not free.score[0]:
        return free, True
    best = free
    for pattern in (free.pattern, alternating(problem.spread)):
        zones = improved(problem.spread, pattern)
        answer = problem.solve(tuple(frozenset({zone}) for zone in zones))
        assert answer is not None, "an exchange keeps to the nodes that each zone has"
        best = min(best, answer, key=lambda a: a.score)
    return _branch(problem, best, anywhere, free)


def _branch(problem: Problem, best: Answer, anywhere: Allowed, free: Answer) -> tuple[Answer, bool]:
    """Depth first, the most promising branch first, without those that cannot be better."""
    left = SEARCH_LIMIT // (len(problem.costs) * len(problem.zone_of))
    open_branches = [((0, free.score[1]), anywhere, free)]
    while open_branches:
        bound, allowed, answer = open_branches.pop()
        if bound >= best.score:
            continue
        best = min(best, answer, key=lambda a: a.score)
        clash = _undecided(problem.spread.clashes, allowed, answer.pattern)
        if clash is None:
            continue
        found = []
        for narrower in _branches(clash, allowed, answer.pattern[clash.places[0]]):
            if not left:
                return best, False
            left -= 1
            branch = problem.solve(narrower)
            if branch is not None:
                sure = _sure_penalty(problem.spread.clashes, narrower)
                found.append(((sure, branch.score[1]), narrower, branch))
        open_branches += sorted(found, key=lambda entry: entry[0], reverse=True)
    return best, True


def _undecided(clashes: Sequence[Clash], allowed: Allowed, pattern: Sequence[str]) -> Clash | None:
    """The first clash that this assignment has, and another one here might not have."""
    return next(
        (
            clash
            for clash in clashes
            if zone_of_all(clash, pattern) is not None
            and any(len(allowed[place]) > 1 for place in clash.places)
        ),
        None,
    )


def _branches(clash: Clash, allowed: Allowed, zone: str) -> list[Allowed]:
    """The ways a clash can go, each once: which place is the first outside the zone, or none."""
    branches = []
    inside = list(allowed)
    for place in clash.places:
        if len(allowed[place]) > 1:
            outside = inside.copy()
            outside[place] = allowed[place] - {zone}
            branches.append(tuple(outside))
            inside[place] = frozenset({zone})
    return [*branches, tuple(inside)]


def _sure_penalty(clashes: Sequence[Clash], allowed: Allowed) -> int:
    """The weight of the clashes that no assignment within these zones is without."""
    return sum(
        clash.weight
        for clash in clashes
        if len(zones := allowed[clash.places[0]]) == 1
        and all(allowed[place] == zones for place in clash.places)
    )
