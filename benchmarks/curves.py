"""How far a run is from the undisturbed one, measured by runs that only sum in another order."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from timed_jobs import Log

from megatron_bamboo.data.samples import samples_of_step

MOST = 3.0
"""So many times the measure a deviation may be."""


def deviations(run: Mapping[int, float], whole: Mapping[int, float]) -> dict[int, float]:
    """By step how far a curve is from the undisturbed one."""
    return {step: abs(run[step] - loss) for step, loss in whole.items()}


def times(value: float, measure: float) -> float:
    """How many times the measure a deviation is; nothing is no times anything."""
    if value == 0:
        return 0.0
    return value / measure if measure else float("inf")


@dataclass(frozen=True, slots=True)
class Curve:
    """A curve and its measure."""

    whole: Mapping[int, float]
    """The undisturbed losses, by step."""
    own: Mapping[int, float]
    """How far the disturbed run is from them."""
    others: Mapping[int, float]
    """How far at most one of the other orders is."""

    def above(self) -> list[int]:
        """The steps at which the deviation is more than it may be."""
        return [step for step in self.own if times(self.own[step], self.others[step]) > MOST]

    def rows(self, size: int, nodes: Mapping[int, int]) -> Iterator[Sequence[str]]:
        """One row for so many steps each."""
        above, last = set(self.above()), max(self.whole)
        for first in range(1, last + 1, size):
            steps = range(first, min(first + size, last + 1))
            numbers = [nodes[step] for step in steps]
            yield (
                f"{steps[0]} to {steps[-1]}",
                " ".join(map(str, dict.fromkeys(numbers))),
                f"{self.whole[steps[-1]]:.4f}",
                f"{max(self.own[step] for step in steps):.2e}",
                f"{max(self.others[step] for step in steps):.2e}",
                f"{max(times(self.own[step], self.others[step]) for step in steps):.2f}",
                str(len(above.intersection(steps))),
            )


def live_nodes(log: Log) -> dict[int, int]:
    """By step how many nodes had joined and not gone when it ended."""
    changes = sorted(
        (event["time"], change)
        for kind, change in (("agent_joined", 1), ("loss", -1), ("drained", -1))
        for event in log.of(kind)
    )
    ends = log.step_ends()
    return {step: sum(c for at, c in changes if at <= end) for step, end in ends.items()}


def sample_complaints(log: Log, num_steps: int, batch: int) -> Iterator[str]:
    """Steps whose newest attempt, which is the one applied, did not read each sample once."""
    reads = log.of("samples")
    newest: dict[int, int] = {}
    for read in reads:
        newest[read["step"]] = max(newest.get(read["step"], 0), read["attempt"])
    # Holders of several stages, and shadows, read a place's samples too.
    places = {
        (read["step"], read["pipeline"], read["microbatch"], *read["samples"])
        for read in reads
        if read["attempt"] == newest[read["step"]]
    }
    for step in range(1, num_steps + 1):
        found = sorted(s for at, _, _, *samples in places if at == step for s in samples)
        if found != list(samples_of_step(step - 1, batch)):
            yield f"step {step} has the samples {found}"


@dataclass(frozen=True, slots=True)
class StateDeviation:
    """How far a tensor is from the undisturbed run's in the end, and is of the other orders."""

    name: str
    own: float
    others: float

    @property
    def kind(self) -> str:
        """What it is of a parameter."""
        return self.name.rpartition("/")[2]

    @property
    def times(self) -> float:
        """The measure, so many."""
        return times(self.own, self.others)


def state_rows(found: Sequence[StateDeviation]) -> Iterator[Sequence[str]]:
    """One row for parameters, and for each kind of moment."""
    for kind in sorted({one.kind for one in found}, reverse=True):
        some = [one for one in found if one.kind == kind]
        ratios = [one.times for one in some]
        yield (
            kind,
            str(len(some)),
            f"{max(one.own for one in some):.2e}",
            f"{max(one.others for one in some):.2e}",
            f"{max(ratios):.2f}",
            str(sum(ratio > MOST for ratio in ratios)),
        )
