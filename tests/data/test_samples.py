from itertools import chain

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.data.samples import microbatch_samples, samples_of_step
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape, equal_pipelines


def test_order_is_megatrons() -> None:
    # Two pipelines, two samples a microbatch: the sampler deals out global microbatches in turn.
    arrangement = equal_pipelines(1, 2, 2)
    dealt = [
        [list(microbatch_samples(1, n, 2, 8)) for n in arrangement.global_microbatches(pipeline)]
        for pipeline in range(2)
    ]
    assert dealt == [[[8, 9], [12, 13]], [[10, 11], [14, 15]]]


@given(
    step=st.integers(0, 50),
    micro_batch_size=st.integers(1, 4),
    microbatches=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_each_sample_of_a_step_is_served_once(
    step: int, micro_batch_size: int, microbatches: list[int]
) -> None:
    arrangement = Arrangement(tuple(PipelineShape(((0, 3),), count) for count in microbatches))
    numbers = [arrangement.global_microbatches(p) for p in range(len(microbatches))]
    assert list(map(len, numbers)) == microbatches
    global_batch_size = micro_batch_size * arrangement.total_microbatches
    served = chain.from_iterable(
        microbatch_samples(step, number, micro_batch_size, global_batch_size)
        for number in chain.from_iterable(numbers)
    )
    assert sorted(served) == list(samples_of_step(step, global_batch_size))
