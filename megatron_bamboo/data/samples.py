"""Which samples a step and a microbatch are made of.

Pure arithmetic, in the order of Megatron's sequential sampler: the global batch is cut into
global microbatches, which are dealt out to the pipelines (``planner/arrangement.py``). Nothing here
depends on which node runs a pipeline, so that a shadow that takes over a microbatch reads the very
samples that the victim would have read.
"""


def samples_of_step(step: int, global_batch_size: int) -> range:
    """The dataset indices of one step; ``step`` counts from 0."""
    assert step >= 0 and global_batch_size >= 1, (step, global_batch_size)
    return range(step * global_batch_size, (step + 1) * global_batch_size)


def microbatch_samples(
    step: int, microbatch: int, micro_batch_size: int, global_batch_size: int
) -> range:
    """The dataset indices of a global microbatch; step and microbatch count from 0."""
    first = microbatch * micro_batch_size
    assert 0 <= first <= global_batch_size - micro_batch_size, (microbatch, global_batch_size)
    return samples_of_step(step, global_batch_size)[first : first + micro_batch_size]
