"""Interleaved 1F1B, computation only: chunk ``c`` of stage ``s`` is virtual stage ``c * P + s``.

Microbatches go through the chunks in groups. Where Megatron-core's
``forward_backward_pipelining_with_interleaving`` accepts the numbers (a multiple of P microbatches)
the groups have P microbatches and the order is its own. Where it refuses them the groups are as
equal as can be and no smaller than P, so that the first microbatch of a group is back at the first
stage when its last one has left it; with fewer than P microbatches there is one group of all.

With equal chunks a forward and a backward of which take ``t`` together, and no latency, one
iteration takes ``t * max(C * M + P - 1, C * P + M - 1)`` for any numbers of stages (P), chunks (C)
and microbatches (M). No order is faster: the first term is a worker's work and the way through the
other stages, the second the last chunk's work and the way of one microbatch through all others.
What groups of more than P cost is memory: stage ``s`` has the activations of up to
``2 * (P - s - 1) + (C - 1) * group + 1`` forwards, and a group has fewer than 2P microbatches.
"""

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.schedule import Program, Schedule, check_shape, one_stage_a_rank


def interleaved(num_stages: int, num_chunks: int, num_microbatches: int) -> Schedule:
    """Interleaved 1F1B of any shape, one stage a rank, without replicas."""
    check_shape(num_stages, num_chunks, num_microbatches)
    programs = tuple(
        stage_program(stage, num_stages, num_chunks, num_microbatches)
        for stage in range(num_stages)
    )
    return one_stage_a_rank(programs, num_chunks, num_microbatches)


def stage_program(stage: int, num_stages: int, num_chunks: int, num_microbatches: int) -> Program:
    """The forwards and backwards of one stage, all of its chunks, in interleaved order."""
    sizes = group_sizes(num_stages, num_microbatches)
    order = _virtual_microbatches(sizes, num_chunks)
    forwards = [Action(stage, chunk, Op.F, m) for chunk, m in order]
    backwards = [Action(stage, num_chunks - 1 - chunk, Op.B, m) for chunk, m in order]
    # The first backward is of the last chunk, which is reached behind the groups of the others;
    # an earlier stage waits for its gradient one forward and one backward longer than the next.
    num_ahead = 2 * (num_stages - stage - 1) + (num_chunks - 1) * max(sizes)
    num_ahead = min(num_ahead, len(order))
    program = forwards[:num_ahead]
    for forward, backward in zip(forwards[num_ahead:], backwards, strict=False):
        program += [forward, backward]
    return (*program, *backwards[len(order) - num_ahead :])


def group_sizes(num_stages: int, num_microbatches: int) -> tuple[int, ...]:
    """How many microbatches go through a chunk in a row, larger groups first."""
    num_groups = max(num_microbatches // num_stages, 1)
    size, num_larger = divmod(num_microbatches, num_groups)
    return (size + 1,) * num_larger + (size,) * (num_groups - num_larger)


def _virtual_microbatches(sizes: tuple[int, ...], num_chunks: int) -> list[tuple[int, int]]:
    """Chunk and microbatch in forward order; backwards go through the chunks the other way."""
    order: list[tuple[int, int]] = []
    first = 0
    for size in sizes:
        microbatches = range(first, first + size)
        order += [(chunk, m) for chunk in range(num_chunks) for m in microbatches]
        first += size
    return order
