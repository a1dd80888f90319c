"""The sweep plans every action that it says, and none that a node never comes to."""

import pytest
from moments import ALL_OPS, MODES_WITH_REPLICAS, PARTS, Campaign, Moment, Pick, moments_of
from moving import moving_moments
from tiny_gpt import Shape

from megatron_bamboo.schedule.actions import TAIL_OPS, Op
from megatron_bamboo.schedule.redundancy import Redundancy

SHAPE = Shape(3, 3, num_chunks=2)


def test_the_plain_sweep_has_756_moments() -> None:
    assert len(moments_of("full")) == 756


@pytest.mark.parametrize("part", PARTS)
def test_each_moment_is_planned_once(part: str) -> None:
    names = [str(moment) for moment in moments_of(part)]
    assert len(names) == len(set(names))


def test_the_lot_falls_alike_in_every_process() -> None:
    assert list(map(str, moments_of("ci")[:3])) == [
        "P3-D1-M4-7steps-lazy-pipeline0-0.0F2",
        "P3-D3-M4-7steps-eager-pipeline1-0.0B1",
        "P3-D3-M4-7steps-lazy-pipeline2-0.0SEND_F1",
    ]


def test_while_state_moves_a_receiver_or_an_onlooker_dies_and_no_only_holder() -> None:
    moments = moving_moments()
    assert len(moments) == len({str(moment) for moment in moments}) == 2 * 38 + 2 * 66
    assert {m.victim for m in moments if not m.num_standbys} == {"node3", "node5"}
    assert {m.victim for m in moments if m.num_standbys} == {"node4", "node8"}


@pytest.mark.parametrize("part", PARTS)
def test_each_action_is_in_the_program_of_its_victim(part: str) -> None:
    for moment in moments_of(part):
        pipeline, rank = moment.shape.place(moment.victim)
        program = moment.shape.whole_schedule(moment.redundancy).programs[rank]
        assert (pipeline, moment.action in program) == (moment.pipeline, True), str(moment)


def test_who_runs_a_redundant_forward_dies_and_not_the_primary() -> None:
    moments = Campaign(SHAPE, Redundancy.EAGER, (Pick.FIRST,), frozenset({Op.RF})).moments()
    assert {(m.victim, m.action.stage) for m in moments if m.pipeline == 0} <= {
        *(("node2", 0), ("node0", 1), ("node1", 2))
    }


def test_every_action_of_every_pipeline_is_that() -> None:
    moments = list(Campaign(SHAPE, Redundancy.BUBBLE, (Pick.EVERY,)).moments())
    programs = SHAPE.schedule("bubble").programs
    whole = {(p, action) for p in range(3) for program in programs for action in program}
    assert {(m.pipeline, m.action) for m in moments} == whole
    # All forwards and backwards, the messages between six virtual stages, 17 that gaps hold.
    assert len(moments) == 3 * (2 * 24 + 4 * 20 + 17)


@pytest.mark.parametrize("variant", ["", "bf16", "zero", "zero-bf16"])
@pytest.mark.parametrize("num_pipelines", [2, 3])
def test_the_sweep_of_the_tail_kills_before_all_of_it(variant: str, num_pipelines: int) -> None:
    shape = Shape(2, num_pipelines, num_steps=4, variant=variant)
    planned = {(m.pipeline, m.action) for m in moments_of("tail") if m.shape == shape}
    programs = shape.whole_schedule("lazy").programs
    tail = {action for program in programs for action in program if action.op in TAIL_OPS}
    assert len(tail) == (18 if variant.startswith("zero") else 14)
    assert planned >= {(number, action) for number in range(num_pipelines) for action in tail}


def test_the_sweep_of_the_tail_kills_before_copies_are_compared() -> None:
    moments = [m for m in moments_of("tail") if m.action.op is Op.VERIFY]
    assert {m.shape.variant for m in moments} == {"verify", "zero-verify"}
    assert len(moments) == 3 * 2 + 2 * 2


def strata(moments: list[Moment], shared: bool) -> set[tuple[object, ...]]:
    return {
        (m.shape.num_pipelines, m.redundancy, m.action.op, m.action.stage, m.action.chunk)
        for m in moments
        if (m.shape.tensor_size > 1) == shared
    }


def test_ci_holds_each_operation_and_chunk_of_one_pipeline() -> None:
    """Of fewer stages than campaigns have."""
    every = {kind[2:] for kind in strata(moments_of("interleaved"), False) if kind[0] == 1}
    drawn = moments_of("ci-interleaved")
    found = {kind[2:] for kind in strata(drawn, False)}
    assert {(op, chunk) for op, _, chunk in found} == {(op, chunk) for op, _, chunk in every}
    assert len(drawn) == len(found)
    assert {moment.redundancy for moment in drawn} == set(MODES_WITH_REPLICAS)
    assert {op for op, _, _ in every} == ALL_OPS


def test_workers_that_share_layers_lose_a_node_at_all_kinds_of_actions() -> None:
    """First, middle and last microbatch, split over the plain and the sequence parallel job."""
    shared = [m for m in moments_of("interleaved") if m.shape.tensor_size > 1]
    for num_pipelines, mode in ((2, Redundancy.EAGER), (1, Redundancy.BUBBLE)):
        whole = Campaign(Shape(3, num_pipelines, num_chunks=2), mode, tuple(Pick)[:3]).moments()
        planned = {m.action for m in shared if m.redundancy is mode}
        assert planned == {m.action for m in whole}
    variants = [moment.shape.variant for moment in shared]
    assert variants.count("sequence-parallel") == 113
    assert variants.count("") == 114
