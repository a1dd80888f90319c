"""Oobleck's rules: its own example, each rule by itself, and what holds for any job."""

from collections import Counter
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, StageSpan
from megatron_bamboo.planner.placement import Holdings, place_nodes
from megatron_bamboo.planner.places import units_needed
from megatron_bamboo.planner.reconfigure import Protection, Reconfiguration, reconfigure
from megatron_bamboo.planner.regroup import PipelineNodes, Rule, Sizes
from megatron_bamboo.planner.transfers import Links, plan_transfers


def pipelines(*sizes: int) -> tuple[PipelineNodes, ...]:
    """Nodes "0", "1", ... in pipelines of these sizes."""
    first = [sum(sizes[:number]) for number in range(len(sizes))]
    return tuple(
        PipelineNodes(tuple(map(str, range(start, start + size))), size)
        for start, size in zip(first, sizes, strict=True)
    )


def named(answer: Reconfiguration) -> str:
    """Nodes by pipeline, as a line."""
    return " ".join(f"[{','.join(pipeline.nodes)}]" for pipeline in answer.pipelines)


def rules(answer: Reconfiguration) -> list[Rule]:
    return [applied.rule for applied in answer.applied]


def test_the_example_of_the_paper() -> None:
    """Of [0,1] [2,3,4] [5-8] [9-13] node 2 is lost."""
    answer = reconfigure(pipelines(2, 3, 4, 5), Sizes(2, 11, 1), leaving={"2"})
    assert named(answer) == "[0,1] [3,4] [5,6,7,8] [9,10,11,12,13]"
    assert [applied.reason for applied in answer.applied] == [
        "pipeline 1 loses 2, 2 left",
        "pipeline 1 takes the template for 2 nodes, not 3",
    ]
    assert (answer.protection, answer.reason) == (
        Protection.PROTECTED,
        "4 pipelines, 2 are needed",
    )


def test_a_short_pipeline_borrows_from_the_largest() -> None:
    answer = reconfigure(pipelines(2, 3, 4), Sizes(2, 5, 1), leaving={"1"})
    assert named(answer) == "[0,8] [2,3,4] [5,6,7]"
    assert (
        answer.applied[1].reason == "pipeline 0 borrows 8 from pipeline 2, which has the most nodes"
    )
    assert rules(answer) == [Rule.DROP, Rule.BORROW, Rule.RESIZE]


def test_a_free_node_fills_the_gap_before_anyone_is_borrowed() -> None:
    answer = reconfigure(pipelines(2, 3, 4), Sizes(2, 5, 1), leaving={"1"}, free=["new"])
    assert named(answer) == "[0,new] [2,3,4] [5,6,7,8]"
    assert rules(answer) == [Rule.DROP, Rule.GROW]


def test_pipelines_merge_where_none_can_spare_a_node() -> None:
    answer = reconfigure(pipelines(2, 2, 2), Sizes(2, 3, 1), leaving={"1"})
    assert named(answer) == "[2,3,0] [4,5]"
    assert answer.before == (1, 2)
    assert [applied.reason for applied in answer.applied[1:]] == [
        "pipeline 0 is dissolved: 5 nodes are too few for 3 pipelines of 2",
        "0 of pipeline 0 joins pipeline 1, which has the fewest nodes",
        "pipeline 1 takes the template for 3 nodes, not 2",
    ]


def test_a_pipeline_without_nodes_is_dropped_and_split_off_anew_where_it_is_needed() -> None:
    lost = {"0", "1"}
    assert named(reconfigure(pipelines(2, 4), Sizes(2, 6, 0), lost)) == "[2,3,4,5]"
    answer = reconfigure(pipelines(2, 4), Sizes(2, 6, 1), lost)
    assert named(answer) == "[2,3] [5,4]"
    assert answer.before == (1, None)
    assert answer.applied[1].reason == (
        "5, 4 make a new pipeline, split off from pipeline 1: 2 are needed"
    )


def test_newcomers_make_a_pipeline_of_their_own_or_join_the_smallest() -> None:
    free = ["a", "b", "c"]
    assert named(reconfigure(pipelines(2, 3), Sizes(2, 4, 1), free=free)) == "[0,1] [2,3,4] [a,b,c]"
    answer = reconfigure(pipelines(3, 4), Sizes(4, 4, 0), free=free)
    assert named(answer) == "[0,1,2,a] [3,4,5,6]"
    assert answer.standbys == ("b", "c")
    waits = [applied.reason for applied in answer.applied if applied.rule is Rule.REST]
    assert waits == [
        f"{node} waits as a standby: no pipeline takes more than 4 nodes" for node in "bc"
    ]


def test_too_few_nodes_are_told_how_many_would_do() -> None:
    answer = reconfigure(pipelines(2, 2), Sizes(2, 3, 1), leaving={"0"})
    assert named(answer) == "[2,3,1]"
    assert answer.protection is Protection.UNPROTECTED
    assert answer.reason == "1 of 2 pipelines: 3 live nodes, add 1 to survive 1 lost"
    answer = reconfigure(answer.pipelines, Sizes(2, 3, 1), leaving={"2", "3"})
    assert (named(answer), answer.standbys) == ("", ("1",))
    assert answer.protection is Protection.TOO_FEW
    assert answer.reason == "1 live nodes do not hold the model: add 1 for one pipeline"


def test_a_pipeline_that_runs_after_a_takeover_gets_the_template_for_its_nodes() -> None:
    degraded = (PipelineNodes(("0", "1", "3"), 4), *pipelines(2)[1:])
    answer = reconfigure(degraded, Sizes(2, 6, 0))
    assert answer.pipelines == (PipelineNodes(("0", "1", "3"), 3),)
    assert rules(answer) == [Rule.RESIZE]


@pytest.mark.parametrize("sizes", [(0, 3, 1), (3, 2, 1), (2, 3, -1)])
def test_impossible_sizes_are_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(ValueError, match=r"there is none|0 or above"):
        Sizes(*sizes)


@st.composite
def changes(
    draw: st.DrawFn,
) -> tuple[tuple[PipelineNodes, ...], Sizes, frozenset[str], tuple[str, ...]]:
    least = draw(st.integers(1, 4))
    sizes = Sizes(least, draw(st.integers(least, 8)), draw(st.integers(0, 2)))
    old = pipelines(*draw(st.lists(st.integers(1, 9), max_size=4)))
    nodes = [node for pipeline in old for node in pipeline.nodes]
    leaving = draw(st.frozensets(st.sampled_from(nodes))) if nodes else frozenset()
    return old, sizes, leaving, tuple("abcdefgh"[: draw(st.integers(0, 8))])


Change = tuple[tuple[PipelineNodes, ...], Sizes, frozenset[str], tuple[str, ...]]


@given(changes())
def test_every_live_node_is_placed_or_waits_in_pipelines_of_allowed_sizes(change: Change) -> None:
    old, sizes, leaving, free = change
    answer = reconfigure(old, sizes, leaving, free)
    live = {node for pipeline in old for node in pipeline.nodes} - leaving | set(free)
    used = [*answer.standbys, *(node for p in answer.pipelines for node in p.nodes)]
    assert Counter(used) == Counter(live)
    for pipeline in answer.pipelines:
        assert sizes.least <= len(pipeline.nodes) == pipeline.num_stages <= sizes.most
    # A node waits only where every pipeline is full, and it cannot make one with others.
    if answer.standbys:
        assert len(answer.standbys) < sizes.least
        assert all(len(pipeline.nodes) == sizes.most for pipeline in answer.pipelines)


@given(changes())
def test_the_answer_says_whether_there_are_nodes_for_what_is_asked(change: Change) -> None:
    old, sizes, leaving, free = change
    answer = reconfigure(old, sizes, leaving, free)
    live = sum(len(pipeline.nodes) for pipeline in old) - len(leaving) + len(free)
    needed = sizes.fault_tolerance + 1
    enough = live >= needed * sizes.least
    assert (
        (answer.protection is Protection.PROTECTED) == enough == (len(answer.pipelines) >= needed)
    )
    assert (
        (answer.protection is Protection.TOO_FEW) == (live < sizes.least) == (not answer.pipelines)
    )


@given(changes())
def test_what_is_arranged_stays_as_it_is(change: Change) -> None:
    old, sizes, leaving, free = change
    once = reconfigure(old, sizes, leaving, free)
    again = reconfigure(once.pipelines, sizes, free=once.standbys)
    assert (again.pipelines, again.standbys) == (once.pipelines, once.standbys)
    assert set(rules(again)) <= {Rule.REST}


def fewest_departures(change: Change) -> int:
    """How many must leave their pipelines, over all sizes that the pipelines could have.

    As many pipelines go on as can, and there are f + 1 if that is possible.
    """
    old, sizes, leaving, free = change
    kept = [sum(node not in leaving for node in pipeline.nodes) for pipeline in old]
    kept = [number for number in kept if number]
    live = sum(kept) + len(free)
    possible = live // sizes.least
    wanted = max(min(len(kept), possible), min(sizes.fault_tolerance + 1, possible))
    allowed = range(sizes.least, sizes.most + 1)
    return min(
        sum(max(had - has, 0) for had, has in zip(kept, after, strict=True))
        for after in product((0, *allowed), repeat=len(kept))
        for more in [max(wanted - sum(map(bool, after)), 0)]
        if sum(after) + more * sizes.least <= live
    )


@given(changes())
def test_no_node_leaves_its_pipeline_that_need_not(change: Change) -> None:
    old, sizes, leaving, free = change
    answer = reconfigure(old, sizes, leaving, free)
    stays = {
        node
        for pipeline, before in zip(answer.pipelines, answer.before, strict=True)
        if before is not None
        for node in set(pipeline.nodes) & set(old[before].nodes)
    }
    members = {node for pipeline in old for node in pipeline.nodes} - leaving
    assert len(members - stays) == fewest_departures(change)


def test_a_loss_becomes_places_and_transfers_within_the_pipeline_that_it_hit() -> None:
    """From pipelines to places: the template gives the stages, and who may stay, stays."""

    def template(size: int) -> tuple[StageSpan, ...]:
        return tuple((12 * stage // size, 12 * (stage + 1) // size) for stage in range(size))

    def arranged(cuts: tuple[tuple[StageSpan, ...], ...]) -> Arrangement:
        return Arrangement(tuple(PipelineShape(spans, 6) for spans in cuts))

    old = pipelines(3, 4, 4)
    before = arranged(tuple(template(pipeline.num_stages) for pipeline in old))
    nodes = [node for pipeline in old for node in pipeline.nodes]
    held = dict(zip(nodes, units_needed(before), strict=True))
    answer = reconfigure(old, Sizes(2, 6, 1), leaving={"5"})
    live = [node for node in nodes if node != "5"]
    holdings = Holdings(held, dict.fromkeys(range(12), 1), stay=answer.stay(old))
    after = arranged(answer.spans(template))
    placement = place_nodes(after, live, holdings)
    assert placement.pipelines == (("0", "1", "2"), ("3", "4", "6"), ("7", "8", "9", "10"))
    assert placement.moved_bytes == 7 and placement.is_least
    moves = plan_transfers(placement.needed(after), held, Links(holdings.unit_bytes))
    assert moves.total_bytes(Links(holdings.unit_bytes)) == 7
    assert {transfer.target for transfer in moves.transfers} == {"3", "4", "6"}
