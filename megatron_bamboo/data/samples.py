"""Which samples a step and a microbatch are made of.

Pure arithmetic, in the order of Megatron's sequential sampler: the global batch is cut into
global microbatches, and global microbatch ``g = microbatch * num_pipelines + pipeline`` belongs to
that pipeline. Nothing here depends on which node runs a pipeline, so that a shadow that takes
over a microbatch reads the very samples that the victim would have read.
"""


def samples_of_step(step: int, global_batch_size: int) -> range:
    """The dataset indices of one step; ``step`` counts from 0."""
    assert step >= 0 and global_batch_size >= 1, (step, global_batch_size)
    return range(step * global_batch_size, (step + 1) * global_batch_size)


def microbatch_samples(
    step: int,
    pipeline: int,
    num_pipelines: int,
    microbatch: int,
    micro_batch_size: int,
    global_batch_size: int,
) -> range:
    """The dataset indices of one pipeline's microbatch; all arguments count from 0."""
    assert 0 <= pipeline < num_pipelines, (pipeline, num_pipelines)
    first = (microbatch * num_pipelines + pipeline) * micro_batch_size
    assert 0 <= first <= global_batch_size - micro_batch_size, (microbatch, global_batch_size)
    return samples_of_step(step, global_batch_size)[first : first + micro_batch_size]


def num_microbatches(global_batch_size: int, micro_batch_size: int, num_pipelines: int) -> int:
    """Microbatches of one pipeline in one step.

    Raises ValueError if the batch does not divide.
    """
    if min(global_batch_size, micro_batch_size, num_pipelines) < 1:
        raise ValueError(
            f"global batch size ({global_batch_size}), micro batch size ({micro_batch_size}) and "
            f"number of pipelines ({num_pipelines}) must all be at least 1"
        )
    per_round = micro_batch_size * num_pipelines
    if global_batch_size % per_round:
        raise ValueError(
            f"the global batch size ({global_batch_size}) is not divisible by micro batch size "
            f"({micro_batch_size}) times pipelines ({num_pipelines}); choose a multiple of "
            f"{per_round}"
        )
    return global_batch_size // per_round
