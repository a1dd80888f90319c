"""The cheapest assignment is what trying all of them finds."""

from itertools import permutations
from math import inf

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.assignment import Cost, least_assignment

CELLS = st.integers(0, 6) | st.just(inf) | st.integers(0, 10**30)


@st.composite
def cost_tables(draw: st.DrawFn) -> list[list[Cost]]:
    rows = draw(st.integers(0, 5))
    columns = draw(st.integers(rows, 6))
    return [[draw(CELLS) for _ in range(columns)] for _ in range(rows)]


def total(costs: list[list[Cost]], columns: tuple[int, ...]) -> Cost:
    return sum((costs[row][column] for row, column in enumerate(columns)), start=0)


@given(cost_tables())
def test_the_cheapest_of_all_assignments_is_found(costs: list[list[Cost]]) -> None:
    width = len(costs[0]) if costs else 0
    least = min(total(costs, columns) for columns in permutations(range(width), len(costs)))
    found = least_assignment(costs)
    if least == inf:
        assert found is None
    else:
        assert found is not None and len(set(found)) == len(costs)
        assert total(costs, found) == least


def test_equal_rows_take_the_columns_as_they_come() -> None:
    assert least_assignment([[0] * 300] * 300) is not None
