"""The computation of an iteration, before any redundancy or message: 1F1B, with chunks interleaved.

Both orders answer for any number of stages and microbatches, whole or stage by stage: a takeover
asks for the one stage that its victim ran.
"""

from megatron_bamboo.schedule import interleaved, one_f_one_b
from megatron_bamboo.schedule.schedule import Program, Schedule


def compute_schedule(num_stages: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Forwards and backwards of all stages, one stage a rank, without replicas."""
    if num_chunks == 1:
        return one_f_one_b.one_f_one_b(num_stages, num_microbatches)
    return interleaved.interleaved(num_stages, num_chunks, num_microbatches)


def stage_program(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> Program:
    """The program of one stage in ``compute_schedule``."""
    if num_chunks == 1:
        return one_f_one_b.stage_program(stage, num_stages, num_microbatches)
    return interleaved.stage_program(stage, num_stages, num_chunks, num_microbatches)
