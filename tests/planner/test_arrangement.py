"""What an arrangement may be, before any node has a place in it."""

import json
from dataclasses import asdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.planner.arrangement import (
    Arrangement,
    PipelineShape,
    StageSpan,
    equal_pipelines,
    spans_of_layers,
    unit_names,
)


def test_an_arrangement_knows_its_sizes() -> None:
    short, long = PipelineShape(((0, 6),), 3), PipelineShape(((0, 2), (2, 5), (5, 6)), 7)
    arrangement = Arrangement((short, long))
    assert (short.num_stages, long.num_stages, arrangement.num_nodes) == (1, 3, 4)
    assert (arrangement.num_units, arrangement.microbatches) == (6, (3, 7))


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ((), "needs a stage"),
        (((1, 3),), "stage 0 begins with unit 1, not 0"),
        (((0, 2), (3, 4)), "stage 1 begins with unit 3, not 2"),
        (((0, 2), (1, 4)), "stage 1 begins with unit 1, not 2"),
        (((0, 2), (2, 2)), "stage 1 has no unit"),
    ],
)
def test_stages_hold_each_unit_once(spans: tuple[StageSpan, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PipelineShape(spans, 1)


def test_pipelines_have_work_and_one_model() -> None:
    with pytest.raises(ValueError, match="-1 microbatches"):
        PipelineShape(((0, 2),), -1)
    with pytest.raises(ValueError, match="needs a pipeline"):
        Arrangement(())
    with pytest.raises(ValueError, match=r"\[2, 3\] units"):
        Arrangement((PipelineShape(((0, 2),), 1), PipelineShape(((0, 3),), 1)))


def test_units_belong_to_the_stages_of_their_chunks() -> None:
    (shape,) = equal_pipelines(2, 1, 4, layers_per_chunk=2, num_chunks=2).pipelines
    assert shape.num_stages == 2
    assert {unit: shape.stage_of(unit) for unit in unit_names(shape.num_units)} == {
        **{"embedding": 0, "layer0": 0, "layer1": 0, "layer2": 1, "layer3": 1},
        **{"layer4": 0, "layer5": 0, "layer6": 1, "layer7": 1, "head": 1},
    }
    assert [shape.spans_of(stage) for stage in range(2)] == [((0, 3), (5, 7)), ((3, 5), (7, 10))]
    with pytest.raises(ValueError, match="3 spans are not 2 for each stage"):
        PipelineShape(((0, 2), (2, 3), (3, 4)), 1, num_chunks=2)


def test_units_with_the_same_stages_have_one_place() -> None:
    """Which are a run of units, wherever a cut of any pipeline is a border of one."""
    cuts = ((1, 2, 1), (2, 2))
    unequal = Arrangement(tuple(PipelineShape(spans_of_layers(cut), 1) for cut in cuts))
    assert unequal.places() == ((0, 0), (1, 0), (1, 1), (2, 1))
    assert [unequal.stages_of(unit) for unit in ("layer1", "layer2")] == [(1, 0), (1, 1)]
    assert not unequal.is_cut_alike
    equal = equal_pipelines(2, 3, 4, num_chunks=2)
    assert equal.is_cut_alike and equal.places() == ((0, 0, 0), (1, 1, 1))


def test_microbatches_are_dealt_out_in_turn_to_who_has_some_left_to_get() -> None:
    shapes = [PipelineShape(((0, 3),), number) for number in (1, 4, 2)]
    dealt = [Arrangement(tuple(shapes)).global_microbatches(pipeline) for pipeline in range(3)]
    assert dealt == [(0,), (1, 3, 5, 6), (2, 4)]


@given(st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_each_global_microbatch_is_dealt_once(numbers: list[int]) -> None:
    arrangement = Arrangement(tuple(PipelineShape(((0, 3),), number) for number in numbers))
    dealt = [arrangement.global_microbatches(pipeline) for pipeline in range(len(numbers))]
    assert sorted(sum(dealt, ())) == list(range(arrangement.total_microbatches))
    if len(set(numbers)) == 1:
        assert dealt == [
            tuple(m * len(numbers) + pipeline for m in range(numbers[0]))
            for pipeline in range(len(numbers))
        ]


def test_json_keeps_an_arrangement() -> None:
    for arrangement in (equal_pipelines(2, 3, 4, num_chunks=2), equal_pipelines(3, 1, 1)):
        assert Arrangement.from_fields(json.loads(json.dumps(asdict(arrangement)))) == arrangement
