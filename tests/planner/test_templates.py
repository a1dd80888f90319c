"""Which templates there are, and what numbers of nodes they cover."""

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.infeasible import Request, covered_nodes
from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.planner.memory import Memory
from megatron_bamboo.planner.templates import (
    TemplateMaker,
    longest_needed,
    longest_useful,
)

COSTS = UnitCosts(tuple(Unit(f"layer{i}", 1, 2, UnitBytes(100, 2)) for i in range(8)), 1)


def sums(least: int, most: int, count: int, fewest: int, total: int) -> bool:
    """Whether numbers between two bounds, at least so many, add up to a total."""
    if total == 0:
        return count >= fewest
    return any(
        sums(least, part, count + 1, fewest, total - part)
        for part in range(least, min(most, total) + 1)
    )


def is_coverable(nodes: int, least: int, most: int, f: int) -> bool:
    """Whether at least f + 1 pipelines of ``least`` to ``most`` nodes can have so many."""
    return max(f + 1, -(-nodes // most)) <= nodes // least


@given(st.integers(1, 14), st.integers(1, 4), st.integers(1, 6), st.integers(0, 3))
def test_coverable_is_what_adds_up(nodes: int, least: int, more: int, f: int) -> None:
    adds_up = sums(least, least + more, 0, f + 1, nodes)
    assert is_coverable(nodes, least, least + more, f) == adds_up
    sizes = range(least, least + more + 1)
    assert (nodes in covered_nodes(Request(nodes, f, nodes + f), sizes, nodes)) == adds_up


@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 60))
def test_no_shorter_longest_template_suffices(least: int, f: int, more: int) -> None:
    fewest = (f + 1) * least
    longest = longest_needed(fewest + more, least, f)

    def suffices(most: int) -> bool:
        return all(is_coverable(n, least, most, f) for n in range(fewest, fewest + more + 1))

    assert suffices(longest) and suffices(longest_useful(fewest + more, least, f))
    assert longest == least or not suffices(longest - 1)


def test_there_is_a_template_for_each_number_of_nodes_that_there_are_units_for() -> None:
    templates = TemplateMaker(COSTS).make_all(range(2, 9))
    assert list(templates) == [2, 3, 4, 5, 6, 7, 8]
    assert all(size == template.num_nodes for size, template in templates.items())
    assert templates[2].pace.time(7) == templates[2].cut.time(7) == 24 + (7 - 2 + 1 - 1) * 12 + 12


def test_with_a_limit_there_are_only_those_that_fit() -> None:
    limit = 750
    templates = TemplateMaker(COSTS, limit).make_all(range(1, 9))
    assert list(templates) == [5, 6, 7, 8]
    for size, template in templates.items():
        nodes = Memory(COSTS).of_cut(template.cut.spans)
        most = template.pace.most
        assert most is not None and most >= 4 * size
        assert max(node.total(most) for node in nodes) <= limit
        assert max(node.total(most + 1) for node in nodes) > limit
