"""The best cut that fits into memory.

What a node needs depends on three stages in a row, and the first stages are in a row with the last
ones, so what is best for a part cannot be told without the rest. The cuts are built up stage by
stage, and of all beginnings that end at the same unit and stage only so many are kept: half of them
those that promise the least time, half those that need the least memory.

What that promises: a cut that is found always fits, planned microbatches included. It is the
fastest of all that fit, *proven*, if nothing was left out, or if it is as fast as the best cut
without any limit. Otherwise it is the best that was found, and one that fits may have been missed.
Small cases are always proven (tests compare them with all cuts there are).
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from heapq import nsmallest
from itertools import pairwise
from typing import NamedTuple

from megatron_bamboo.planner.cut import PLANNED_MICROBATCHES, Cut, cut_at
from megatron_bamboo.planner.layers import UnitCosts, prefix_sums
from megatron_bamboo.planner.memory import NO_UNITS, Memory, most_microbatches

KEPT = 8


@dataclass(frozen=True, slots=True)
class Fitted:
    """What the search has come to."""

    cut: Cut | None
    """None if none was found that fits."""
    is_proven: bool
    """Whether there is no better one, or none at all."""


def planned_need(memory: Memory, cut: Cut) -> int:
    """The bytes of the worker that needs most, with the microbatches that cuts are planned for."""
    return max(node.total(cut.planned_microbatches) for node in memory.of_cut(cut.spans))


class _Start(NamedTuple):
    """The first stages of a cut."""

    promise: int
    """No cut that begins like this is faster."""
    peak: int
    """The most that a node needs, as far as it is known."""
    bounds: tuple[int, ...]
    work: int
    """Of the slowest stage."""
    k: int
    """The rightmost slowest stage."""

    def what_matters(self) -> tuple[object, ...]:
        """Starts that have the same of this go on alike."""
        return self.bounds[:3], self.bounds[-3:], self.work, self.k, self.bounds[self.k]


class Fitter:
    """Cuts of one model within a limit.

    Args:
        limit: bytes of one worker.
        kept: how many beginnings of cuts to keep.
    """

    def __init__(self, costs: UnitCosts, limit: int, kept: int = KEPT) -> None:
        self._works = costs.works().ticks
        self._sums = prefix_sums(self._works)
        self.memory = Memory(costs)
        self._limit = limit
        self._kept = kept

    def best(self, num_stages: int, free: Cut) -> Fitted:
        """The best cut that fits.

        Args:
            free: the best one without a limit.
        """
        if self._fits(free):
            return Fitted(free, is_proven=True)
        if self._never_fits(num_stages):
            return Fitted(None, is_proven=True)
        starts, dropped = [_Start(0, 0, (0,), 0, 0)], False
        for _ in range(num_stages - 1):
            starts, has_dropped = self._keep(self._grow_all(starts, num_stages))
            dropped |= has_dropped
        starts = sorted(self._grow_all(starts, num_stages))
        # Only of whole cuts it is known what the last nodes need, whose shadows are the first.
        cuts = (cut_at(self._works, list(pairwise(start.bounds))) for start in starts)
        cut = next(filter(self._fits, cuts), None)
        if cut is None:
            return Fitted(None, is_proven=not dropped)
        return Fitted(cut, is_proven=not dropped or cut.planned_time == free.planned_time)

    def most_microbatches(self, cut: Cut) -> int | None:
        """How many a pipeline with this cut can have; None if memory does not limit them."""
        return most_microbatches(self.memory.of_cut(cut.spans), self._limit)

    def _fits(self, cut: Cut) -> bool:
        return planned_need(self.memory, cut) <= self._limit

    def _never_fits(self, num_stages: int) -> bool:
        """Whether the state alone is more than all nodes together hold; of one stage there is but
        one cut."""
        return num_stages == 1 or min(num_stages, 3) * self.memory.state > num_stages * self._limit

    def _grow_all(self, starts: Iterable[_Start], num_stages: int) -> Iterable[_Start]:
        """Each with one stage more; of those that go on alike only one."""
        grown = (longer for start in starts for longer in self._grow(start, num_stages))
        return {start.what_matters(): start for start in grown}.values()

    def _grow(self, start: _Start, num_stages: int) -> Iterator[_Start]:
        """One stage more, in each way that may still fit."""
        stage, first = len(start.bounds) - 1, start.bounds[-1]
        behind, num_units = num_stages - stage - 1, len(self._works)
        others = self._others(start.bounds, num_stages)
        in_flight = num_stages - stage
        for past in range(first + 1, num_units - behind + 1) if behind else (num_units,):
            state, saved = self.memory.state_of((first, past)), self.memory.saved_by((first, past))
            needs = (alone + state + runs * in_flight * saved for alone, runs in others)
            peak = max(start.peak, *needs)
            if peak > self._limit:
                return  # with more units it is more
            work, k = start.work, start.k
            own = self._sums[past] - self._sums[first]
            if own >= work:
                work, k = own, stage
            bounds = (*start.bounds, past)
            yield _Start(self._promise(bounds, work, k, num_stages), peak, bounds, work, k)

    def _others(self, bounds: tuple[int, ...], num_stages: int) -> list[tuple[int, bool]]:
        """By node that the next stage matters to, what it needs beside that stage, and whether it
        would run it: the node of the stage, of the one before, and of the one before that."""
        spans = [*pairwise(bounds), NO_UNITS, NO_UNITS, NO_UNITS]
        stage = len(bounds) - 1
        others = []
        for back in range(min(stage, 2) + 1):
            node = self.memory.of_node(num_stages, stage - back, *spans[stage - back :][:3])
            others.append((node.total(PLANNED_MICROBATCHES * num_stages), back < 2))
        return others

    def _promise(self, bounds: tuple[int, ...], work: int, k: int, num_stages: int) -> int:
        """What all cuts with these first stages take at least; of a whole cut its time."""
        total, planned = self._sums[-1], (PLANNED_MICROBATCHES - 1) * num_stages
        stays = total + (planned + k - 1) * work + total - self._sums[bounds[k]]
        behind = num_stages - len(bounds) + 1
        if not behind:
            return stays
        least = -(-(total - self._sums[bounds[-1]]) // behind)
        # Or one of the stages behind becomes the rightmost slowest.
        slower = max(work, least)
        comes = total + (planned + len(bounds) - 2) * slower + slower
        return comes if least > work else min(stays, comes)

    def _keep(self, starts: Iterable[_Start]) -> tuple[list[_Start], bool]:
        by_end: dict[int, list[_Start]] = {}
        for start in starts:
            by_end.setdefault(start.bounds[-1], []).append(start)
        kept, dropped = [], False
        for group in by_end.values():
            if len(group) > self._kept:
                half = self._kept // 2
                frugal = nsmallest(half, group, key=lambda start: (start.peak, start))
                group = list({*nsmallest(half, group), *frugal})
                dropped = True
            kept += group
        return kept, dropped
