"""No other split of the microbatches makes the slowest pipeline faster."""

from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.microbatches import Pace, split


def every_split(num_pipelines: int, num_microbatches: int) -> Iterator[tuple[int, ...]]:
    if num_pipelines == 1:
        yield (num_microbatches,)
        return
    for first in range(1, num_microbatches - num_pipelines + 2):
        for rest in every_split(num_pipelines - 1, num_microbatches - first):
            yield (first, *rest)


def slowest(paces: list[Pace], numbers: tuple[int, ...]) -> int:
    return max(pace.time(number) for pace, number in zip(paces, numbers, strict=True))


def fits(paces: list[Pace], numbers: tuple[int, ...]) -> bool:
    pairs = zip(paces, numbers, strict=True)
    return all(pace.most is None or number <= pace.most for pace, number in pairs)


# A formula's part beside the microbatches may be below 0.
PACES = st.builds(Pace, st.integers(-20, 60), st.integers(1, 12), st.none() | st.integers(1, 6))


@given(st.lists(PACES, min_size=1, max_size=4), st.integers(1, 10))
def test_no_other_split_is_faster(paces: list[Pace], num_microbatches: int) -> None:
    every = [
        numbers for numbers in every_split(len(paces), num_microbatches) if fits(paces, numbers)
    ]
    if not every:
        with pytest.raises(ValueError, match="microbatches"):
            split(paces, num_microbatches)
        return
    found = split(paces, num_microbatches)
    assert found in every
    assert slowest(paces, found) == min(slowest(paces, numbers) for numbers in every)


def test_equal_pipelines_get_equal_shares_and_the_later_ones_less() -> None:
    assert split([Pace(5, 3)] * 3, 9) == (3, 3, 3)
    assert split([Pace(5, 3)] * 3, 8) == (3, 3, 2)
    assert split([Pace(5, 3)] * 3, 7) == (3, 2, 2)


def test_what_cannot_be() -> None:
    with pytest.raises(ValueError, match="2 microbatches for 3 pipelines"):
        split([Pace(0, 1)] * 3, 2)
    with pytest.raises(ValueError, match="memory holds no 5"):
        split([Pace(0, 1, most=2)] * 2, 5)
    with pytest.raises(ValueError, match="no pipeline"):
        split([], 5)
