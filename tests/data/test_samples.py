from itertools import chain, product

from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.data.samples import microbatch_samples, samples_of_step


def test_order_is_megatrons() -> None:
    # Two pipelines, two samples a microbatch: the sampler deals out global microbatches in turn.
    dealt = {
        (microbatch, pipeline): list(microbatch_samples(1, pipeline, 2, microbatch, 2, 8))
        for microbatch, pipeline in product(range(2), range(2))
    }
    assert dealt == {(0, 0): [8, 9], (0, 1): [10, 11], (1, 0): [12, 13], (1, 1): [14, 15]}


@given(
    step=st.integers(0, 50),
    num_pipelines=st.integers(1, 4),
    micro_batch_size=st.integers(1, 4),
    microbatches=st.integers(1, 6),
)
def test_each_sample_of_a_step_is_served_once(
    step: int, num_pipelines: int, micro_batch_size: int, microbatches: int
) -> None:
    global_batch_size = num_pipelines * micro_batch_size * microbatches
    served = chain.from_iterable(
        microbatch_samples(step, d, num_pipelines, m, micro_batch_size, global_batch_size)
        for m, d in product(range(microbatches), range(num_pipelines))
    )
    assert list(served) == list(samples_of_step(step, global_batch_size))
