"""The iterations of a job whose nodes come and go: how long each took, and what happened in it.

*Calm* is one in which nothing happens and nothing has just happened. What others take longer than
calm ones with the same stages on the same nodes and the same microbatches is what was held up.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

from timed_jobs import Log


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration."""

    number: int
    seconds: float
    end: float
    """On the monotonic clock."""
    arranged: str
    """Which stages shared a node in it, and the microbatches, pipeline by pipeline."""
    epoch: int
    moves: bool
    """Whether state moved in it."""
    loses: bool
    """Whether a node was lost in it."""
    is_redone: bool
    """Whether it was begun anew."""
    follows_save: bool
    """Whether the state was saved before it."""


def steps_of(log: Log) -> tuple[Step, ...]:
    """All but the first, of which nobody knows when it began."""
    moving = {event["step"]: event for event in log.of("changed")}
    plans = {event["epoch"]: event for event in log.of("plan") if "pipelines" in event}
    epochs = {done.step: done.epoch for done in log.actions}
    losses = [event["time"] for event in log.of("loss")]
    redone = {event["step"] for event in log.of("samples") if event["attempt"]}
    saved = {event["step"] for event in log.of("saved")}
    ends, found = log.step_ends(), []
    for number, seconds in sorted(log.step_seconds().items()):
        plan = plans[epochs[number]]
        made = [e for s, e in moving.items() if e["epoch"] == plan["epoch"] and s < number]
        step = Step(
            number,
            seconds,
            ends[number],
            _arranged((made[-1] if made else plan)["pipelines"]),
            plan["epoch"],
            moves=number in moving,
            loses=any(ends[number] - seconds < at <= ends[number] for at in losses),
            is_redone=number in redone,
            follows_save=number - 1 in saved,
        )
        found.append(step)
    return tuple(found)


def _arranged(pipelines: Sequence[Mapping[str, Any]]) -> str:
    words = []
    for pipeline in pipelines:
        stages = pipeline["stages"]
        places = "".join(str(stages.index(node)) for node in stages)
        words.append(f"{places}x{pipeline['shape']['num_microbatches']}")
    return " ".join(words)


def calm(steps: Sequence[Step]) -> Iterator[Step]:
    """Those in which nothing happens, and nothing has just happened."""
    for before, step in pairwise(steps):
        is_same = before.epoch == step.epoch and before.number + 1 == step.number
        if is_same and not (before.moves or step.moves or step.loses or step.follows_save):
            yield step


def calm_seconds(jobs: Iterable[Sequence[Step]]) -> Mapping[str, float]:
    """By arrangement what a calm iteration of any of these jobs takes, in the median."""
    found: defaultdict[str, list[float]] = defaultdict(list)
    for steps in jobs:
        for step in calm(steps):
            found[step.arranged].append(step.seconds)
    return {arranged: median(seconds) for arranged, seconds in found.items()}
