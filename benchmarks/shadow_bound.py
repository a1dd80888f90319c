"""The least that a takeover can take: the shadow's work from then on, without any wait.

Computed from what the event log says that the shadow had done, by counting; nothing here asks the
product in which order a takeover does things.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from timed_jobs import Done

from megatron_bamboo.schedule.actions import Op


def shadow_ends_at(
    done: Iterable[Done],
    kill: float,
    shadow: str,
    own_stage: int,
    victim_stage: int,
    num_microbatches: int,
    seconds: Mapping[tuple[int, Op], float],
    num_mirrored: int = 0,
) -> float:
    """When the shadow has done its own stage's work and the victim's, at the earliest.

    What it had begun when the kill came it ends. Its redundant forwards count as the victim's
    forwards; the victim's backwards are all to be done again, since their sum is lost, but for
    those of the first ``num_mirrored`` microbatches, of whose sum it has a copy.

    Args:
        done: the shadow's step so far, or all of it; each pipeline stage has one chunk.
        kill: the moment of the loss.
        seconds: of a computation, by stage and operation.
    """
    begun = [one for one in done if one.worker == shadow and one.start <= kill]
    counts = Counter(
        (one.action.stage, one.action.op)
        for one in begun
        if one.action.op is not Op.RF or (one.action.microbatch or 0) >= num_mirrored
    )
    free = max([kill, *(one.end for one in begun)])
    left = {
        (own_stage, Op.F): num_microbatches - counts[own_stage, Op.F],
        (own_stage, Op.B): num_microbatches - counts[own_stage, Op.B],
        (victim_stage, Op.F): num_microbatches - num_mirrored - counts[victim_stage, Op.RF],
        (victim_stage, Op.B): num_microbatches - num_mirrored,
    }
    return free + sum(number * seconds[what] for what, number in left.items())
