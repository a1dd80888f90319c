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

from megatron_bamboo.schedule.actions import Op


@dataclass(frozen=True, slots=True)
class Step:
    """One iteration."""

    number: int
    seconds: float
    end: float
    """On the monotonic clock."""
    arranged: str
    """Which stages shared a node in it, their cut and the microbatches, pipeline by pipeline."""
    epoch: int
    again: int
    """How often all had gone back to a checkpoint before it."""
    moves: bool
    """Whether state moved in it."""
    loses: bool
    """Whether a node was lost in it."""
    is_redone: bool
    """Whether it was begun anew."""
    follows_save: bool
    """Whether the state was saved before its work."""


def steps_of(log: Log) -> tuple[Step, ...]:
    """All but the first, of which nobody knows when it began, and but the first after each return
    to a checkpoint."""
    events = log.of("plan")
    plans = {event["epoch"]: event for event in events if "pipelines" in event}
    returns = [epoch for epoch, plan in plans.items() if plan["restored"] is not None]
    ends: defaultdict[tuple[int, int], float] = defaultdict(float)
    epochs: dict[tuple[int, int], int] = {}
    for done in log.actions:
        if done.action.op is Op.STEP:
            key = (sum(epoch <= done.epoch for epoch in returns), done.step)
            ends[key] = max(ends[key], done.end)
            epochs[key] = max(epochs.get(key, 0), done.epoch)
    found = (
        _step(log, plans[epochs[key]], key, ends[key[0], key[1] - 1], end)
        for key, end in sorted(ends.items())
        if (key[0], key[1] - 1) in ends
    )
    return tuple(found)


def _step(
    log: Log, plan: Mapping[str, Any], key: tuple[int, int], start: float, end: float
) -> Step:
    again, number = key
    changes = [event for event in log.of("changed") if event["epoch"] == plan["epoch"]]
    made = [event for event in changes if event["step"] < number]

    def happened(kind: str) -> bool:
        return any(start < event["time"] <= end for event in log.of(kind))

    return Step(
        number,
        end - start,
        end,
        _arranged((made[-1] if made else plan)["pipelines"]),
        plan["epoch"],
        again,
        moves=any(event["step"] == number for event in changes),
        loses=happened("loss"),
        is_redone=any(
            event["attempt"] and event["step"] == number and start < event["time"] <= end
            for event in log.of("samples")
        ),
        follows_save=happened("saved"),
    )


def _arranged(pipelines: Sequence[Mapping[str, Any]]) -> str:
    words = []
    for pipeline in pipelines:
        stages, number = pipeline["stages"], pipeline["shape"]["num_microbatches"]
        # One that begins has nothing to do yet.
        places = "".join(str(stages.index(node)) for node in stages if number)
        ends = "-".join(str(past) for _, past in pipeline["shape"]["spans"] if number)
        words.append(f"{places}/{ends}x{number}")
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
