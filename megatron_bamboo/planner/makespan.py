"""How long an iteration of a pipeline takes: the schedule's own time, where a formula is a guess.

It is what ``simulate(one_f_one_b(..))`` gives (a test compares them bit for bit), for the one
schedule whose order is known beforehand: 1F1B without latency. So nothing has to be looked up, and
twenty arrangements of a thousand nodes can be compared.
"""

from collections.abc import Sequence


def one_f_one_b_seconds(
    forwards: Sequence[float], backwards: Sequence[float], num_microbatches: int
) -> float:
    """The time until the last backward ends.

    Args:
        forwards: by stage what one takes.
        backwards: likewise.
    """
    size = len(forwards)
    free = [0.0] * size
    """When each stage has done what is before its next forward or backward."""
    # When the newest backward of each stage ended, which the stage before it waits for.
    gradient = [0.0] * (size + 1)
    for newest in range(num_microbatches + size - 1):
        if newest < num_microbatches:
            arrived = 0.0
            for stage in range(size):
                arrived = free[stage] = max(arrived, free[stage]) + forwards[stage]
        gradient = _backwards(free, gradient, backwards, newest, num_microbatches)
    return max(free)


def _backwards(
    free: list[float],
    gradient: Sequence[float],
    backwards: Sequence[float],
    newest: int,
    num_microbatches: int,
) -> list[float]:
    """The backward of each stage that follows its forward of the newest microbatch.

    Stage s of S is S - s - 1 forwards ahead of its backwards, so what it waits for ended in the
    round before; of the last stage, in this one.
    """
    size = len(free)
    ended = list(gradient)
    for stage, seconds in enumerate(backwards):
        if 0 <= newest - (size - stage - 1) < num_microbatches:
            free[stage] = ended[stage] = max(free[stage], gradient[stage + 1]) + seconds
    return ended
