"""Which stage a user's code is on, as Megatron-core's ``parallel_state`` answers it.

After a takeover one worker computes for two stages, so the answer is set for each action.
"""

from megatron.core import parallel_state


def set_current_stage(stage: int, chunk: int, num_stages: int, num_chunks: int) -> None:
    """Let ``is_pipeline_first_stage`` and its like answer for this stage and chunk."""
    parallel_state.set_pipeline_model_parallel_rank(stage)
    parallel_state.set_pipeline_model_parallel_world_size(num_stages)
    if num_chunks > 1:
        parallel_state.set_virtual_pipeline_model_parallel_world_size(num_chunks)
        parallel_state.set_virtual_pipeline_model_parallel_rank(chunk)
