"""The best cut of the units into stages, by Oobleck's formula for the time of an iteration.

With w_i the forward and backward of stage i, counted from 0, and k the rightmost slowest of S
stages, Nb microbatches take T = T1 + T2 + T3: T1 = sum of w_i (the first microbatch),
T2 = (Nb - S + k - 1) w_k (what the slowest stage still has to do) and T3 = sum of w_i for i >= k
(Oobleck, section 4.1.2). A cut is planned for Nb = 4 S; each microbatch more takes w_k more.

Oobleck halves the problem and keeps one best for each part, which is not always the best of all.
Here each range of units is tried as the slowest stage. With it the time is settled but for k, and
the less k the less the time: so k is the fewest stages that can hold what comes before.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_bamboo.planner.arrangement import StageSpan
from megatron_bamboo.planner.layers import prefix_sums

PLANNED_MICROBATCHES = 4
"""For each stage: what a cut is planned for."""


@dataclass(frozen=True, slots=True)
class Cut:
    """Stages in their order, with the work of each."""

    spans: tuple[StageSpan, ...]
    works: tuple[int, ...]

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    @property
    def slowest(self) -> int:
        """The rightmost slowest stage."""
        return max(range(len(self.works)), key=lambda stage: (self.works[stage], stage))

    @property
    def work_of_slowest(self) -> int:
        """What one microbatch more takes."""
        return max(self.works)

    @property
    def time_before(self) -> int:
        """What an iteration takes beside ``work_of_slowest`` for each microbatch."""
        k = self.slowest
        return (k - 1 - self.num_stages) * self.works[k] + sum(self.works) + sum(self.works[k:])

    @property
    def least_before(self) -> int:
        """The same for the least that any schedule takes: of the first microbatch all stages'
        work, of each other one that of the slowest. The formula is never above it, and far below
        with few microbatches or a slowest stage that comes early."""
        return sum(self.works) - self.work_of_slowest

    def time(self, num_microbatches: int) -> int:
        """What an iteration takes by the formula."""
        return self.time_before + num_microbatches * self.work_of_slowest

    @property
    def planned_microbatches(self) -> int:
        """What the cut is planned for."""
        return PLANNED_MICROBATCHES * self.num_stages

    @property
    def planned_time(self) -> int:
        """What an iteration of these takes."""
        return self.time(self.planned_microbatches)


def cut_at(works: Sequence[int], spans: Sequence[StageSpan]) -> Cut:
    """The cut of these units into these stages."""
    return Cut(tuple(spans), tuple(sum(works[first:past]) for first, past in spans))


class _Slowest(NamedTuple):
    """A range of units as the slowest stage, and the fewest stages beside it."""

    work: int
    first: int
    past: int
    fewest_before: int
    fewest_after: int


class _Best(NamedTuple):
    """The least wins: of equally fast cuts the one whose slowest stage does least, then the one
    in which it comes first, then the one with the fewest units before it."""

    time: int
    work: int
    k: int
    first: int
    past: int


class Cutter:
    """The best cuts of one model into any number of stages.

    Which range is the slowest stage leaves open how the units before and after it are cut. They
    are filled up from the last stage on, none doing more than is needed with so many stages: early
    stages hold most activations at once, so they get what is left.
    """

    def __init__(self, works: Sequence[int]) -> None:
        self._sums = prefix_sums(works)
        self._ranges = sorted(self._slowest())

    @property
    def num_units(self) -> int:
        """The most stages that there can be."""
        return len(self._sums) - 1

    def best(self, num_stages: int) -> Cut:
        """The cut with the least time.

        Raises:
            ValueError: there are not so many units, or no stage is asked for.
        """
        if num_stages < 1:
            raise ValueError(f"{num_stages} stages: there must be one")
        if num_stages > self.num_units:
            raise ValueError(
                f"{num_stages} stages: the model has {self.num_units} units, and a stage needs one"
            )
        found = self._find(num_stages)
        before = self._fill(0, found.first, found.k, found.work)
        after = self._fill(found.past, self.num_units, num_stages - 1 - found.k, found.work - 1)
        spans = (*before, (found.first, found.past), *after)
        return Cut(spans, tuple(self._work(*span) for span in spans))

    def _find(self, num_stages: int) -> _Best:
        best: _Best | None = None
        total = self._sums[-1]
        planned = (PLANNED_MICROBATCHES - 1) * num_stages
        for work, first, past, fewest_before, fewest_after in self._ranges:
            if best is not None and total + planned * work > best.time:
                break  # all that follow do more
            k = max(fewest_before, num_stages - 1 - (self.num_units - past), 0)
            if k <= min(first, num_stages - 1 - fewest_after):
                time = total + (planned + k - 1) * work + total - self._sums[first]
                found = _Best(time, work, k, first, past)
                best = found if best is None else min(best, found)
        assert best is not None, "a cut into one unit a stage and one large stage always exists"
        return best

    def _slowest(self) -> Iterator[_Slowest]:
        for first in range(self.num_units):
            for past in range(first + 1, self.num_units + 1):
                work = self._work(first, past)
                before = self._fewest(0, first, work)
                after = self._fewest(past, self.num_units, work - 1)
                if before is not None and after is not None:
                    yield _Slowest(work, first, past, before, after)

    def _work(self, first: int, past: int) -> int:
        return self._sums[past] - self._sums[first]

    def _fewest(self, first: int, past: int, most: int) -> int | None:
        """The fewest stages for a range, none with more work than ``most``; None if there is no
        such cut."""
        count = 0
        while first < past:
            reached = bisect_right(self._sums, self._sums[first] + most, first) - 1
            if reached == first:
                return None
            first, count = reached, count + 1
        return count

    def _fill(self, first: int, past: int, parts: int, most: int) -> tuple[StageSpan, ...]:
        """A range in so many stages, with the least work for the one that does most."""
        if parts == 0:
            return ()
        needed = self._least_most(first, past, parts, most)
        spans: list[StageSpan] = []
        for left in reversed(range(parts)):
            least = first + left  # the stages before need a unit each
            start = max(least, bisect_left(self._sums, self._sums[past] - needed))
            spans.append((start, past))
            past = start
        assert past == first, "with so much work a stage, fewer stages would do"
        return tuple(reversed(spans))

    def _least_most(self, first: int, past: int, parts: int, most: int) -> int:
        """How little the stage that does most can do."""
        low = -(-self._work(first, past) // parts)
        while low < most:
            middle = (low + most) // 2
            fewest = self._fewest(first, past, middle)
            if fewest is not None and fewest <= parts:
                most = middle
            else:
                low = middle + 1
        return low
