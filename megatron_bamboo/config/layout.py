"""How many of what a run has."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Layout:
    """Follows from the options and the number of nodes."""

    num_stages: int
    num_chunks: int  # a stage
    num_pipelines: int
    num_microbatches: int  # a pipeline and step
    global_batch_size: int
    tensor_size: int = 1
    num_shards: int = 1  # of the optimizer's state, one a pipeline if it is more than 1

    @property
    def total_microbatches(self) -> int:
        """Microbatches of one step, over all pipelines."""
        return self.num_pipelines * self.num_microbatches
