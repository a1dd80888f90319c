"""Reading traces, and taking parts of them."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from playing import traces

from megatron_bamboo.simulator.trace import HOUR, Moment, Trace, read_trace

PAPERS = Path(__file__).parents[2].parent / "shared" / "traces"

NAMED = "0,add,a\r\n0,add,b\r\n60000,remove,a\r\n60000,add,c\r\n120000,add,a\r\n180000,remove,b\r\n"
COUNTED = """
2021-12-11, 11:11:30, 2
2021-12-11, 11:13:30, 4
2021-12-11, 11:12:30, 1
2021-12-11, 11:15:00, 1
"""


def test_rows_of_nodes() -> None:
    trace = read_trace(NAMED)
    assert trace.present == ("a", "b")
    assert trace.moments == (
        Moment(60.0, ("c",), ("a",)),
        Moment(120.0, ("a.2",)),  # a node that comes back is another one
        Moment(180.0, (), ("b",)),
    )
    assert (trace.seconds, trace.num_added, trace.num_removed) == (180.0, 2, 2)
    assert trace.node_seconds == 60 * 2 + 60 * 2 + 60 * 3


def test_rows_of_numbers_count_from_the_newest_time_above() -> None:
    trace = read_trace(COUNTED)
    assert [*trace.counts()] == [(0.0, 2), (120.0, 1)]
    assert trace.seconds == 210.0
    assert len(trace.moments[0].added) == 2 and len(trace.moments[0].removed) == 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "there is no row in it"),
        ("0,add,a\n0,took,b\n", "line 2 is 0,took,b: all rows are `milliseconds,add or remove"),
        ("0,add\n", "line 1 is 0,add: all rows are"),
        ("x,add,a\n", "line 1 is x,add,a: all rows are"),
        ("0,add,a\n\n5,add,a\n", "line 3 is of a: it adds it, and it is there"),
        ("0,remove,a\n", "line 1 is of a: it removes it, and it is not there"),
        ("5,add,a\n4,add,b\n", "line 2 is earlier than the one above it"),
        ("2021-13-11, 11:11:30, 2\n", "line 1 is 2021-13-11,11:11:30,2: all rows are"),
        ("2021-12-11, 11:11:30, many\n", "line 1 is 2021-12-11,11:11:30,many: all rows are"),
    ],
)
def test_what_is_no_trace_is_refused_by_line(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as refused:
        read_trace(text)
    assert str(refused.value).startswith(problem)


def test_a_window_begins_with_those_who_are_there() -> None:
    part = read_trace(NAMED).window(60.0, 100.0)
    assert part == Trace(("b", "c"), (Moment(60.0, ("a.2",)),), 100.0)
    with pytest.raises(ValueError, match=r"has 0.05 hours: none of it is in the rest from hour 1 "):
        read_trace(NAMED).window(HOUR)


@given(traces(), st.integers(1, 8))
def test_fewer_nodes_are_the_same_nodes(trace: Trace, most: int) -> None:
    part = trace.at_most(most)
    numbers = [number for _, number in part.counts()]
    assert min(numbers) >= 0
    assert max(numbers) <= most
    kept = {*part.present, *(node for moment in part.moments for node in moment.added)}
    before = [m for m in trace.moments if kept & {*m.added, *m.removed}]
    assert [m.seconds for m in part.moments] == [m.seconds for m in before]
    assert trace.at_most(100) == trace


needs_papers = pytest.mark.skipif(not PAPERS.is_dir(), reason="the papers' traces are not here")


@needs_papers
@pytest.mark.parametrize(
    ("name", "hours", "added", "removed", "fewest", "most", "mean"),
    [
        ("p3-trace.csv", 11.37, 177, 167, 10, 32, 24.03),
        ("g4dn-trace.csv", 10.77, 79, 74, 2, 24, 12.60),
        ("a100x1-east1b.txt", 27.02, None, None, 17, 64, 57.3),
        ("v100x1-east1c.txt", 24.17, None, None, 30, 80, 76.3),
    ],
)
def test_the_papers_traces_have_what_is_known_of_them(
    name: str,
    hours: float,
    added: int | None,
    removed: int | None,
    fewest: int,
    most: int,
    mean: float,
) -> None:
    trace = read_trace((PAPERS / name).read_text())
    assert trace.seconds / HOUR == pytest.approx(hours, abs=0.005)
    if added is not None:
        assert (len(trace.present) + trace.num_added, trace.num_removed) == (added, removed)
    full = [number for seconds, number in trace.counts() if seconds >= 900]  # once it is under way
    assert (min(full), max(full)) == (fewest, most)
    assert trace.node_seconds / trace.seconds == pytest.approx(mean, abs=0.05)


@needs_papers
def test_the_papers_fourth_hour() -> None:
    part = read_trace((PAPERS / "p3-trace.csv").read_text()).window(4 * HOUR, HOUR)
    assert (part.num_removed, part.num_added) == (18, 26)
