"""The same batches, summed in another order: what changes a run by rounding alone.

In each step the microbatches of the global batch change places, as drawn for the step. Each keeps
its samples and its dropout masks, so that all that differs is which pipeline adds it to the
gradient, and when. That is done to a worker's functions from outside: no training wants it.
"""

import random
from functools import cache
from typing import Any

from megatron_bamboo.data.samples import microbatch_samples


@cache
def order_of(seed: int, step: int, num_microbatches: int) -> tuple[int, ...]:
    """By place in a step's batch the microbatch that is there; steps count from 1."""
    numbers = list(range(num_microbatches))
    random.Random(f"{seed}/{step}").shuffle(numbers)
    return tuple(numbers)


def permute(seed: int, num_microbatches: int) -> None:
    """Let this process's training take the microbatches of each step in an order of this seed."""
    # With them comes torch, which only workers need.
    from megatron_bamboo.execution import step_data
    from megatron_bamboo.execution.compute import Compute

    set_context = Compute._set_context

    def samples(step: int, microbatch: int, *sizes: int) -> range:
        number = order_of(seed, step + 1, num_microbatches)[microbatch]
        return microbatch_samples(step, number, *sizes)

    def set_permuted(compute: Compute, action: Any, schedule: Any, step: int) -> None:
        set_context(compute, action, schedule, step)
        order = order_of(seed, step, num_microbatches)
        compute._dropout.microbatch = order[compute._dropout.microbatch]

    step_data.microbatch_samples = samples  # type: ignore[assignment]
    Compute._set_context = set_permuted  # type: ignore[method-assign]
