"""Which stage a script's code is on, as Megatron-core's ``parallel_state`` answers it.

After a takeover one worker computes for two stages, so the answer is set for each action.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


def set_current_stage(stage: int, chunk: int, num_stages: int, num_chunks: int) -> None:
    """Let ``is_pipeline_first_stage`` and its like answer for this stage and chunk."""
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(num_stages)
    set_current_chunk(chunk, num_chunks)


def set_current_chunk(chunk: int, num_chunks: int) -> None:
    """Let them answer for this chunk, on a worker that has one stage."""
    if num_chunks > 1:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks)
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)


def set_script_groups(pipeline: ProcessGroup, data: ProcessGroup) -> None:
    """Let a script find its groups where they are in Megatron-core's own loop; of several lists of
    data-parallel peers there is room for one."""
    parallel_state._PIPELINE_MODEL_PARALLEL_GROUP = pipeline
    parallel_state._DATA_PARALLEL_GROUP = data
    parallel_state._DATA_PARALLEL_GROUP_WITH_CP = data


@contextmanager
def first_worker() -> Iterator[None]:
    """Let Megatron's state say, inside of the block, that this is the first worker of all."""
    with _state(_MPU_PIPELINE_MODEL_PARALLEL_RANK=0, _MPU_TENSOR_MODEL_PARALLEL_RANK=0):
        yield


@contextmanager
def no_chunks() -> Iterator[None]:
    """Let it say, inside of the block, that stages have no chunks, also when another model had."""
    with _state(
        _VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE=None, _VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK=None
    ):
        yield


@contextmanager
def _state(**values: int | None) -> Iterator[None]:
    before = {name: getattr(parallel_state, name) for name in values}
    for name, value in values.items():
        setattr(parallel_state, name, value)
    try:
        yield
    finally:
        for name, earlier in before.items():
            setattr(parallel_state, name, earlier)
