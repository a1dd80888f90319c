"""Whose copy counts where some differ, and who gives it to whom under a later plan."""

from dataclasses import replace

import pytest

from megatron_bamboo.membership.decision import StepDecision
from megatron_bamboo.planner.arrangement import (
    Arrangement,
    PipelineShape,
    equal_pipelines,
    spans_of_layers,
)
from megatron_bamboo.planner.dissolving import go_on_after
from megatron_bamboo.planner.healing import heal
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.planner.trust import Copy, Difference, Kind, find_differences, plan_mends

# Pipelines node0 to node2 and node3 to node5; node0 and node3 hold the replicas of stage 1.
PLAN = initial_plan([f"node{n}" for n in range(6)], equal_pipelines(3, 2, 2), "lazy")
STEP = 7
NOT_APPLIED = StepDecision(STEP + 1, False, None, "nobody entered its commit")


def copies(plan: Plan = PLAN, kind: Kind = Kind.OPTIMIZER) -> dict[Copy, int]:
    """Of layer1, all alike."""
    return {
        Copy("layer1", 0, kind, number, is_replica): 5
        for number, pipeline in enumerate(plan.pipelines)
        for is_replica, holder in ((False, pipeline.stages[1]), (True, pipeline.replicas[1]))
        if holder is not None
    }


def found(
    *values: int, kind: Kind = Kind.OPTIMIZER, shared: bool = False, plan: Plan = PLAN
) -> tuple[Difference, ...]:
    """What differs where the copies have these digests: primary, replica, the next pipeline's."""
    digests = dict(zip(sorted(copies(plan, kind)), values, strict=True))
    return find_differences(digests, plan, shared)


def test_nothing_differs_where_all_are_alike() -> None:
    assert found(5, 5, 5, 5) == ()
    assert find_differences({}, PLAN, False) == ()


@pytest.mark.parametrize(
    ("values", "wrong", "agreeing", "is_certain"),
    [
        ((1, 5, 5, 5), ["node1"], ("node0", "node4", "node3"), True),
        ((5, 5, 5, 1), ["node3"], ("node1", "node0", "node4"), True),
        ((1, 5, 2, 5), ["node1", "node4"], ("node0", "node3"), True),
        # As many on either side: the first pipeline's count, and there the primary's.
        ((1, 1, 5, 5), ["node4", "node3"], ("node1", "node0"), False),
        ((1, 2, 3, 4), ["node0", "node4", "node3"], ("node1",), False),
    ],
)
def test_most_are_believed(
    values: tuple[int, ...], wrong: list[str], agreeing: tuple[str, ...], is_certain: bool
) -> None:
    differences = found(*values)
    assert [d.worker for d in differences] == wrong
    assert {(d.agreeing, d.is_certain, d.stage) for d in differences} == {(agreeing, is_certain, 1)}


def test_a_shard_has_copies_in_one_pipeline_alone_and_parameters_have_them_in_all() -> None:
    """What pipelines have of the optimizer's state differs anyway."""
    assert found(1, 1, 5, 5, shared=True) == ()
    (difference,) = found(1, 2, 5, 5, shared=True)
    assert (difference.worker, difference.is_certain) == ("node0", False)
    (difference,) = found(1, 5, 5, 5, kind=Kind.PARAMETERS, shared=True)
    assert (difference.worker, difference.is_certain) == ("node1", True)


def test_each_tensor_rank_is_judged_by_itself() -> None:
    plan = PLAN.for_tensor_rank(1, 2)
    both = {**copies(plan), **{replace(copy, tensor_rank=1): 9 for copy in copies(plan)}}
    both[min(copy for copy in both if copy.tensor_rank == 1)] = 1
    (difference,) = find_differences(both, plan, False)
    assert (difference.copy.tensor_rank, difference.worker) == (1, "node1:1")
    assert str(difference).startswith("layer1 (tensor rank 1) on node1, primary of stage 1 in")


def test_the_line_says_what_is_known() -> None:
    certain, guess = found(1, 5, 5, 5)[0], found(1, 1, 5, 5)[0]
    assert str(certain) == (
        "layer1 on node1, primary of stage 1 in pipeline 0, differed in its optimizer state from "
        "node0 and 2 more: it gets what node0 and 2 more have"
    )
    assert str(guess).endswith(
        "nobody can say which is right, so it gets what node1 has, the first of them"
    )


def mends(
    differences: tuple[Difference, ...], now: Plan = PLAN, shared: bool = False
) -> list[tuple[str | None, tuple[str, ...]]]:
    planned = plan_mends(differences, PLAN, now, shared)
    assert {mend.unit for mend in planned} <= {"layer1"}
    return [(mend.source, mend.targets) for mend in planned]


def test_who_differs_gets_it_from_one_who_does_not() -> None:
    assert mends(()) == []
    assert mends(found(5, 1, 5, 5)) == [("node1", ("node0",))]
    assert mends(found(1, 5, 5, 2)) == [("node0", ("node1", "node3"))]


def test_after_a_loss_another_gives_it_and_a_shadow_too_gets_it_first() -> None:
    without_source = plan_after_loss(PLAN, {"node1"}, NOT_APPLIED)
    assert without_source.pipelines[0].stages[1] == "node0"
    assert mends(found(5, 1, 5, 5), without_source) == [("node4", ("node0",))]
    without_target = plan_after_loss(PLAN, {"node0"}, NOT_APPLIED)
    assert mends(found(5, 1, 5, 5), without_target) == []


def test_nobody_gives_a_shard_that_is_in_no_other_pipeline() -> None:
    lost = plan_after_loss(PLAN, {"node1"}, NOT_APPLIED)
    assert mends(found(1, 2, 5, 5, shared=True), lost, shared=True) == [(None, ("node0",))]
    assert mends(found(1, 2, 5, 5, shared=True), shared=True) == [("node1", ("node0",))]


def test_who_was_given_it_in_the_same_step_gets_it_again() -> None:
    """It came from one whose state was wrong already, perhaps."""
    lost = plan_after_loss(PLAN, {"node0"}, StepDecision(STEP - 1, True, (), "it passed"))
    healing = heal(lost, StepDecision(STEP - 1, True, (), "it passed"), last_step=20)
    assert healing.change is not None and healing.change.step == STEP
    given = {t.target for t in healing.change.transfers if t.stage == 1}
    differences = found(1, 5, 5, plan=lost)
    planned = plan_mends(differences, lost, healing.made(), shared=False)
    (mend,) = planned
    assert (mend.source, set(mend.targets)) == ("node4", {"node1"} | given)


def test_who_is_to_get_a_whole_stage_anyway_is_not_mended_before() -> None:
    lost = go_on_after(PLAN, {"node0", "node1"}, NOT_APPLIED, range(1, 21), None, {})
    assert lost.pipelines[0].stages[1] == "node2"
    assert mends(found(5, 5, 1, 5), lost) == [("node3", ("node4",))]


def test_of_pipelines_that_are_cut_apart_units_are_compared_and_mended() -> None:
    """Layer 8 comes before layer 10, and both before the head, in every pipeline."""
    cuts = ((6, 5), (9, 1, 1))
    arrangement = Arrangement(tuple(PipelineShape(spans_of_layers(cut), 1) for cut in cuts))
    plan = initial_plan([f"node{n}" for n in range(5)], arrangement, "lazy")
    wrong = [Copy(unit, 0, Kind.PARAMETERS, 0, False) for unit in ("head", "layer10", "layer8")]
    digests = {
        replace(copy, pipeline=pipeline, is_replica=is_replica): 5
        for copy in wrong
        for pipeline in range(2)
        for is_replica in (False, True)
    }
    differences = find_differences(digests | dict.fromkeys(wrong, 1), plan, False)
    assert {d.stage for d in differences} == {1}
    planned = plan_mends(differences, plan, plan, shared=False)
    assert [(mend.unit, mend.members) for mend in planned] == [
        (unit, ("node0", "node1")) for unit in ("layer8", "layer10", "head")
    ]
    lost = plan_after_loss(plan, {"node0"}, NOT_APPLIED)
    sources = {mend.unit: mend.source for mend in plan_mends(differences, plan, lost, False)}
    assert sources == {"layer8": "node2", "layer10": "node4", "head": "node4"}
