"""The 1F1B schedule, computation only.

The order is that of Megatron-core's ``forward_backward_pipelining_without_interleaving``: a stage
runs as many forwards ahead as there are stages behind it, then alternates, then drains. With equal
stages and no latency an iteration takes the time of M + P - 1 forwards and backwards.
"""

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Program, Schedule, check_shape, one_stage_a_rank


def one_f_one_b(num_stages: int, num_microbatches: int) -> Schedule:
    """1F1B for any number of stages and microbatches, one stage a rank, without replicas."""
    check_shape(num_stages, 1, num_microbatches)
    programs = tuple(
        stage_program(stage, num_stages, num_microbatches) for stage in range(num_stages)
    )
    return one_stage_a_rank(programs, 1, num_microbatches)


def stage_program(stage: int, num_stages: int, num_microbatches: int) -> Program:
    """The forwards and backwards of one stage in 1F1B order."""
    num_ahead = min(num_stages - stage - 1, num_microbatches)
    forwards = [Action(stage, 0, Op.F, m) for m in range(num_microbatches)]
    backwards = [Action(stage, 0, Op.B, m) for m in range(num_microbatches)]
    program = forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        program += [forward, backward]
    return (*program, *backwards[num_microbatches - num_ahead :])
