"""The least that a takeover can take: the shadow's work from then on, without any wait.

Computed from what the event log says that the shadow had done, by counting; nothing here asks the
product in which order a takeover does things.

Not even that can be had where the shadow's last work is waited for: the backwards of the stages
before it come after. The least with those is the classic bound for one machine whose jobs have
tails (Carlier, 1982): some jobs, and then the shortest tail among them.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from timed_jobs import Done

from megatron_bamboo.schedule.actions import COMPUTE_OPS, TAIL_OPS, Action, Op
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.dependencies import Dependencies
from megatron_bamboo.schedule.rehearse import Rehearsal


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


def last_ends_at(hit: Rehearsal, costs: Costs) -> float:
    """When the iteration ends at the earliest, in whatever order the shadow works.

    Every backward is whole: it gives the gradients of input and weights together.
    """
    (shadow,) = {hit.remaining.placement[stage] for stage in hit.moved_stages}
    free = max([hit.loss.time, *(timed.end for timed in hit.before.rows[shadow])])
    tails = _tails(hit, costs)
    jobs = [action for action in hit.remaining.programs[shadow] if action.op in COMPUTE_OPS]
    ends, total = free, 0.0
    for job in sorted(jobs, key=lambda job: -tails[job]):
        total += costs.of(job)
        ends = max(ends, free + total + tails[job])
    return ends


def _tails(hit: Rehearsal, costs: Costs) -> dict[Action, float]:
    """By action the longest chain of work that cannot begin before it has ended."""
    received = frozenset(a for made in hit.progress.values() for a in made.received)
    dependencies = Dependencies(hit.remaining, received)
    left = [a for program in hit.remaining.programs for a in program if a.op not in TAIL_OPS]
    needs = {action: dependencies.needs_here(action) for action in left}
    tails = dict.fromkeys(left, 0.0)
    for action in reversed(tuple(TopologicalSorter(needs).static_order())):
        for need in needs[action]:
            tails[need] = max(tails[need], costs.of(action) + tails[action])
    return tails
