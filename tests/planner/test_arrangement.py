"""What an arrangement may be, before any node has a place in it."""

import pytest

from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, StageSpan


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
    with pytest.raises(ValueError, match="0 microbatches"):
        PipelineShape(((0, 2),), 0)
    with pytest.raises(ValueError, match="needs a pipeline"):
        Arrangement(())
    with pytest.raises(ValueError, match=r"\[2, 3\] units"):
        Arrangement((PipelineShape(((0, 2),), 1), PipelineShape(((0, 3),), 1)))
