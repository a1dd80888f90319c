import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.validate import validate


def test_order_is_that_of_megatron_without_interleaving() -> None:
    texts = [" ".join(map(str, program)) for program in one_f_one_b(3, 4).programs]
    assert texts == [
        "0.0F0 0.0F1 0.0F2 0.0B0 0.0F3 0.0B1 0.0B2 0.0B3",
        "1.0F0 1.0F1 1.0B0 1.0F2 1.0B1 1.0F3 1.0B2 1.0B3",
        "2.0F0 2.0B0 2.0F1 2.0B1 2.0F2 2.0B2 2.0F3 2.0B3",
    ]


def test_fewer_microbatches_than_stages() -> None:
    texts = [" ".join(map(str, program)) for program in one_f_one_b(4, 2).programs]
    assert texts == [
        "0.0F0 0.0F1 0.0B0 0.0B1",
        "1.0F0 1.0F1 1.0B0 1.0B1",
        "2.0F0 2.0F1 2.0B0 2.0B1",
        "3.0F0 3.0B0 3.0F1 3.0B1",
    ]


@given(st.integers(1, 9), st.integers(1, 12))
def test_any_size_is_valid(num_stages: int, num_microbatches: int) -> None:
    validate(lower(one_f_one_b(num_stages, num_microbatches)))


@pytest.mark.parametrize(("num_stages", "num_microbatches"), [(0, 1), (1, 0), (-1, 4)])
def test_nothing_to_schedule_is_refused(num_stages: int, num_microbatches: int) -> None:
    with pytest.raises(ValueError, match="at least one stage, one chunk and one microbatch"):
        one_f_one_b(num_stages, num_microbatches)
