from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.chart import Chart, Kind, chart_of, chart_of_takeover
from megatron_bamboo.schedule.costs import EQUAL_COSTS
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, loss_before, rehearse
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import simulate
from megatron_bamboo.schedule.trace import as_trace


def pipeline(
    num_stages: int, num_chunks: int, num_microbatches: int, mode: str, num_mirrors: int = 0
) -> Schedule:
    compute = compute_schedule(num_stages, num_chunks, num_microbatches)
    return lower(add_redundancy(compute, Redundancy(mode), num_mirrors=num_mirrors))


def takeover(schedule: Schedule, lost: str) -> Chart:
    loss = loss_before(simulate(schedule, EQUAL_COSTS), Action.parse(lost))
    return chart_of_takeover(rehearse(schedule, EQUAL_COSTS, loss))


def bars_of(chart: Chart, rank: int) -> list[str]:
    return [f"{b.action}@{b.start:g}-{b.end:g}" for b in chart.bars if b.rank == rank]


def test_bars_of_an_undisturbed_iteration() -> None:
    schedule = pipeline(2, 1, 1, "eager")
    chart = chart_of(schedule, simulate(schedule, EQUAL_COSTS))
    assert bars_of(chart, 0) == ["0.0F0@0-1", "1.0RF0@1-2", "0.0RECV_B0@2-5", "0.0B0@5-7"]
    assert bars_of(chart, 1) == [
        *("1.0RECV_F0@0-1", "1.0F0@1-2", "0.0RF0@2-3", "1.0B0@3-5", "None@5-7"),
    ]
    assert [(str(a.sender.action), str(a.receiver.action)) for a in chart.arrows] == [
        ("0.0F0", "1.0F0"),
        ("1.0B0", "0.0B0"),
    ]
    assert chart.loss is None


def test_a_takeover_shows_both_parts_and_whose_work_was_taken_over() -> None:
    chart = takeover(pipeline(3, 2, 3, "bubble"), "1.1B0")
    assert chart.loss is not None
    victim_end = max(bar.end for bar in chart.bars if bar.rank == 1)
    assert victim_end == chart.loss.time
    taken_over = [bar for bar in chart.bars if bar.taken_over]
    assert {(bar.rank, bar.action.stage) for bar in taken_over if bar.action} == {(0, 1)}
    assert min(bar.start for bar in taken_over) >= chart.loss.time
    kinds = Counter(bar.kind for bar in taken_over)
    assert kinds[Kind.BACKWARD] == 6
    assert kinds[Kind.REDUNDANT] == kinds[Kind.WAIT] == 0


def test_a_redundant_forward_sent_after_the_loss_is_where_its_message_comes_from() -> None:
    chart = takeover(pipeline(3, 1, 2, "eager"), "1.0SEND_F0")
    senders = {str(arrow.sender.action) for arrow in chart.arrows}
    assert "1.0RF0" in senders


@pytest.mark.parametrize("lost", ["", "1.0B3"])
def test_mirrors_are_marked_where_they_leave(lost: str) -> None:
    schedule = pipeline(3, 1, 4, "lazy", num_mirrors=2)
    undisturbed = chart_of(schedule, simulate(schedule, EQUAL_COSTS))
    chart = takeover(schedule, lost) if lost else undisturbed
    ends = {(bar.rank, bar.action): bar.end for bar in chart.bars}
    for mark in chart.marks:
        assert mark.time == ends[mark.rank, mark.action.with_op(Op.B)]
    assert Counter(mark.rank for mark in chart.marks) == {0: 2, 1: 2, 2: 2}
    events = as_trace(chart)["traceEvents"]
    assert isinstance(events, list)
    names = {event["name"] for event in events if event["ph"] == "i" and event["s"] == "t"}
    assert names == {str(mark.action) for mark in chart.marks}


@given(
    st.integers(2, 5),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(["lazy", "bubble", "eager"]),
    st.data(),
)
def test_bars_fill_each_rank_s_time_as_long_as_it_lives(
    num_stages: int, num_chunks: int, num_microbatches: int, mode: str, data: st.DataObject
) -> None:
    schedule = pipeline(num_stages, num_chunks, num_microbatches, mode)
    timeline = simulate(schedule, EQUAL_COSTS)
    victim = data.draw(st.integers(0, num_stages - 1))
    part = data.draw(st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]))
    loss = loss_at(timeline, victim, part * timeline.makespan)
    hit = chart_of_takeover(rehearse(schedule, EQUAL_COSTS, loss))
    for chart, ends in (
        (chart_of(schedule, timeline), dict.fromkeys(range(num_stages), timeline.makespan)),
        (hit, {rank: hit.makespan for rank in range(num_stages)} | {victim: loss.time}),
    ):
        for rank, expected_end in ends.items():
            now = 0.0
            for bar in (bar for bar in chart.bars if bar.rank == rank):
                assert bar.start == now < bar.end
                now = bar.end
            assert now == expected_end
        for arrow in chart.arrows:
            assert arrow.sender.end <= arrow.receiver.start


@pytest.mark.parametrize("lost", ["", "1.1B0"])
def test_the_trace_has_a_slice_a_bar_and_a_flow_a_message(lost: str) -> None:
    schedule = pipeline(3, 2, 3, "bubble")
    undisturbed = chart_of(schedule, simulate(schedule, EQUAL_COSTS))
    chart = takeover(schedule, lost) if lost else undisturbed
    events = as_trace(chart)["traceEvents"]
    assert isinstance(events, list)
    phases = Counter(event["ph"] for event in events)
    assert phases["X"] == len(chart.bars)
    assert phases["s"] == phases["f"] == len(chart.arrows) > 0
    assert phases["i"] == (1 if lost else 0)
    slices = [event for event in events if event["ph"] == "X"]
    assert {"0.1B2", "wait for 1.0RECV_F0"} <= {event["name"] for event in slices}
    assert ("1.1B0 (taken over)" in {event["name"] for event in slices}) == bool(lost)
    for event in events:
        if event["ph"] in "sf":
            assert any(
                s["tid"] == event["tid"] and s["ts"] <= event["ts"] <= s["ts"] + s["dur"]
                for s in slices
            )
