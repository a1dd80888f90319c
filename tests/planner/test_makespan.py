"""The short way to an iteration's time gives what the simulation of the schedule gives."""

from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_bamboo.planner.makespan import one_f_one_b_seconds
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.one_f_one_b import one_f_one_b
from megatron_bamboo.schedule.simulate import simulate

SECONDS = st.floats(1e-3, 10) | st.sampled_from([1.0, 2.0])


@settings(max_examples=40)
@given(st.lists(st.tuples(SECONDS, SECONDS), min_size=1, max_size=6), st.integers(1, 14))
def test_it_is_the_simulation_bit_for_bit(
    stages: list[tuple[float, float]], num_microbatches: int
) -> None:
    forwards, backwards = zip(*stages, strict=True)
    schedule = lower(one_f_one_b(len(stages), num_microbatches))
    simulated = simulate(schedule, Costs(forwards, backwards)).makespan
    assert one_f_one_b_seconds(forwards, backwards, num_microbatches) == simulated


def test_equal_stages_take_what_is_known() -> None:
    assert one_f_one_b_seconds([1.0] * 8, [2.0] * 8, 16) == 69
