"""What follows from the options and the number of nodes."""

from dataclasses import dataclass

from megatron_bamboo.planner.arrangement import Arrangement


@dataclass(frozen=True, slots=True)
class Layout:
    """How a run begins; its plans say what has become of the arrangement."""

    arrangement: Arrangement
    global_batch_size: int
    tensor_size: int = 1
    num_shards: int = 1  # of the optimizer's state, one a pipeline if it is more than 1
