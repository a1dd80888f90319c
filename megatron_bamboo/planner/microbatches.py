"""How many microbatches each pipeline gets: those with which the slowest one is fastest.

Each pipeline gets at least one (Oobleck, section 4.2.2). A pipeline's time grows with each of its
microbatches by the same amount, so with a time given it is known how many each can do, and the
least time with which they can do all is found by halving.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Pace:
    """How long a pipeline takes, in ticks."""

    before: int
    """Beside the microbatches."""
    each: int
    """For each microbatch."""
    most: int | None = None
    """The most microbatches that its memory holds; None if that is free."""

    def time(self, num_microbatches: int) -> int:
        """Of so many microbatches."""
        return self.before + self.each * num_microbatches

    def number_within(self, time: int) -> int:
        """How many microbatches fit into a time; one where not even that does."""
        number = max(1, (time - self.before) // self.each)
        return number if self.most is None else min(number, self.most)


def split(paces: Sequence[Pace], num_microbatches: int) -> tuple[int, ...]:
    """By pipeline its number of microbatches; of what ties leave open, later ones get less.

    Raises:
        ValueError: there are fewer than pipelines, or more than memory holds.
    """
    _check(paces, num_microbatches)
    time = _time_of_shares(paces, num_microbatches)
    numbers = [pace.number_within(time) for pace in paces]
    surplus = sum(numbers) - num_microbatches
    for place in reversed(range(len(paces))):
        if surplus and numbers[place] > 1 and paces[place].time(numbers[place]) == time:
            numbers[place] -= 1
            surplus -= 1
    assert not surplus, "a tick less would have done"
    return tuple(numbers)


def least_time(paces: Sequence[Pace], num_microbatches: int) -> int:
    """What the slowest pipeline takes at best.

    Raises:
        ValueError: there are fewer microbatches than pipelines, or more than memory holds.
    """
    numbers = split(paces, num_microbatches)
    return max(pace.time(number) for pace, number in zip(paces, numbers, strict=True))


def _time_of_shares(paces: Sequence[Pace], num_microbatches: int) -> int:
    """The least time in which all are done, by pipelines that take longer for one alone, too."""
    kinds = Counter(paces)  # most pipelines are alike
    low = min(pace.time(1) for pace in kinds)
    high = max(pace.time(num_microbatches) for pace in kinds)
    while low < high:
        middle = (low + high) // 2
        done = sum(count * pace.number_within(middle) for pace, count in kinds.items())
        if done >= num_microbatches:
            high = middle
        else:
            low = middle + 1
    return low


def _check(paces: Sequence[Pace], num_microbatches: int) -> None:
    if not paces:
        raise ValueError("there is no pipeline to give microbatches to")
    if num_microbatches < len(paces):
        raise ValueError(
            f"{num_microbatches} microbatches for {len(paces)} pipelines: each needs one"
        )
    limits = [pace.most for pace in paces if pace.most is not None]
    if 0 in limits or (len(limits) == len(paces) and sum(limits) < num_microbatches):
        raise ValueError(f"memory holds no {num_microbatches} microbatches in these pipelines")
