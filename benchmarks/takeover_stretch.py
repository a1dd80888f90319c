"""How much longer a takeover makes the iteration it hits, against the least it could be.

Every rank is lost at moments spread evenly over the iteration, in the simulator, for each mode of
redundancy, with or without mirrored gradients. The stretch is against the undisturbed iteration of
the same mode, and counts no pause for detection. The bound is the stretch if the shadow, which has
two stages' work to do from then on, never had to wait. The least counts the way through the other
stages too, after the last work that they wait for: in whatever order the shadow works, with whole
backwards none is shorter.

    python benchmarks/takeover_stretch.py --stages 8 --microbatches 16 --mirror-gradients 8
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import quantiles

from shadow_bound import last_ends_at
from tables import table

from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.rehearse import loss_at, rehearse
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.simulate import Timeline, simulate

MODES = (Redundancy.LAZY, Redundancy.BUBBLE, Redundancy.EAGER)
QUARTERS = (0.25, 0.5, 0.75, 1.0)
ROUNDING = 1e-9
DISTRIBUTION_HEADS = (
    *("redundancy", "chunks", "iteration", "losses"),
    *("stretch", "bound", "above it", "at it", "above the least", "at it"),
)
QUARTER_HEADS = (
    *("redundancy", "chunks", "lost rank"),
    *("stretch at 25, 50, 75 and 100 %", "bound", "least"),
)


@dataclass(frozen=True, slots=True)
class Stretch:
    """What one takeover adds to its iteration, as a part of it, and the least it could add."""

    stretch: float
    bound: float
    least: float


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A schedule, and its iteration undisturbed."""

    mode: Redundancy
    schedule: Schedule
    undisturbed: Timeline
    costs: Costs

    def lose(self, victim: int, part: float) -> Stretch:
        """A rank is lost when that part of the iteration is over."""
        whole = self.undisturbed.makespan
        loss = loss_at(self.undisturbed, victim, part * whole)
        hit = rehearse(self.schedule, self.costs, loss)
        ends = (hit.timeline.makespan, hit.bound, last_ends_at(hit, self.costs))
        return Stretch(*(max(end, whole) / whole - 1 for end in ends))

    def cells(self) -> tuple[str, str]:
        """What it is, in a table."""
        return self.mode.value, str(self.schedule.num_chunks)


def pipelines(args: argparse.Namespace, costs: Costs) -> tuple[Pipeline, ...]:
    """Each number of chunks in each mode."""
    made = []
    for num_chunks, mode in product(args.chunks, MODES):
        compute = compute_schedule(args.stages, num_chunks, args.microbatches)
        schedule = lower(add_redundancy(compute, mode, costs, args.mirror_gradients))
        made.append(Pipeline(mode, schedule, simulate(schedule, costs), costs))
    return tuple(made)


def distribution_rows(pipes: Sequence[Pipeline], num_moments: int) -> Iterator[Sequence[str]]:
    """One row a mode and number of chunks, over all ranks and moments."""
    for pipe in pipes:
        places = product(range(pipe.schedule.num_stages), range(num_moments))
        losses = [pipe.lose(victim, (moment + 0.5) / num_moments) for victim, moment in places]
        above_bound = [loss.stretch - loss.bound for loss in losses]
        above_least = [loss.stretch - loss.least for loss in losses]
        yield (
            *pipe.cells(),
            f"{pipe.undisturbed.makespan:g}",
            str(len(losses)),
            _five_numbers([loss.stretch for loss in losses]),
            _five_numbers([loss.bound for loss in losses]),
            _five_numbers(above_bound),
            _part_at_zero(above_bound),
            _five_numbers(above_least),
            _part_at_zero(above_least),
        )


def quarter_rows(pipes: Sequence[Pipeline]) -> Iterator[Sequence[str]]:
    """The first, a middle and the last rank, lost after each quarter of the iteration."""
    for pipe in pipes:
        last = pipe.schedule.num_stages - 1
        for victim in sorted({0, last // 2, last}):
            losses = [pipe.lose(victim, part) for part in QUARTERS]
            columns = zip(*((loss.stretch, loss.bound, loss.least) for loss in losses), strict=True)
            numbers = (" ".join(f"{value:.3f}" for value in column) for column in columns)
            yield (*pipe.cells(), str(victim), *numbers)


def _part_at_zero(values: Sequence[float]) -> str:
    return f"{sum(value <= ROUNDING for value in values) / len(values):.0%}"


def _five_numbers(values: Sequence[float]) -> str:
    """Least, quartiles and most."""
    first, median, third = quantiles(values, n=4, method="inclusive")
    return " ".join(f"{v:.3f}" for v in (min(values), first, median, third, max(values)))


def main(argv: Sequence[str] | None = None) -> int:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--stages", type=int, default=8)
    parser.add_argument("--chunks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument(
        "--mirror-gradients", type=int, default=0, metavar="K", help="mirrors of each chunk"
    )
    parser.add_argument("--moments", type=int, default=10, help="losses of each rank")
    parser.add_argument("--costs", type=Path, metavar="FILE", help="JSON as for bamboo schedule")
    args = parser.parse_args(argv)
    costs = EQUAL_COSTS if args.costs is None else Costs.from_json(args.costs.read_text())
    pipes = pipelines(args, costs)
    sys.stdout.write(
        f"{args.stages} stages, {args.microbatches} microbatches, {args.mirror_gradients} mirrors. "
        "Five numbers are the least, the quartiles and the most.\n\n"
    )
    sys.stdout.write(table(DISTRIBUTION_HEADS, distribution_rows(pipes, args.moments)) + "\n")
    sys.stdout.write(table(QUARTER_HEADS, quarter_rows(pipes)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
