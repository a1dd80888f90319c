"""How long a schedule takes, played with given costs.

Sends cost their worker no time and arrive after ``latency``; a receive blocks until then. So the
idle time of the simulation is that of the schedule itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.costs import Costs
from megatron_bamboo.schedule.dependencies import Dependencies
from megatron_bamboo.schedule.play import Timed, play
from megatron_bamboo.schedule.schedule import NO_ACTIONS, Actions, Schedule


@dataclass(frozen=True, slots=True)
class Timeline:
    """Start and end of each action, by rank."""

    rows: tuple[tuple[Timed, ...], ...]

    @property
    def makespan(self) -> float:
        """When the last action ends."""
        return max((row[-1].end for row in self.rows if row), default=0.0)

    def busy(self, rank: int) -> float:
        """The time that a rank computes."""
        return sum(timed.end - timed.start for timed in self.rows[rank])

    def idle(self, rank: int) -> float:
        """The time that a rank does not compute before the last action of all ranks ends."""
        return self.makespan - self.busy(rank)


def simulate(
    schedule: Schedule,
    costs: Costs,
    received: Actions = NO_ACTIONS,
    free_at: Sequence[float] = (),
) -> Timeline:
    """The schedule played from time 0, or with each rank free from ``free_at[rank]`` on.

    ``received``: messages that had arrived before. One whose send is in no program is taken to
    have been under way, so it is there as well.
    """
    dependencies = Dependencies(schedule, received)
    needs = {a: dependencies.needs_here(a) for program in schedule.programs for a in program}
    streams = [(program,) for program in schedule.programs]
    rows = play(streams, needs, costs.of, latency=costs.latency, free_at=free_at)
    assert all(map(_is_whole, rows, schedule.programs)), "the schedule deadlocks: validate it"
    return Timeline(rows)


def _is_whole(row: tuple[Timed, ...], program: tuple[Action, ...]) -> bool:
    return len(row) == len(program)
