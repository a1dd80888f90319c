"""A job's status as one value: who runs and shadows what, how far it is, who waits.

Each form in which it is shown (``render.py``, JSON, ``metrics.py``) tells the same.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

from megatron_bamboo.watching.history import Loss


class Phase(StrEnum):
    """What a job is about."""

    STARTING = "starting"
    """Its nodes have not all joined."""
    RUNNING = "running"
    WAITING = "waiting for nodes"
    """Nobody is left who could go on, and nodes may come."""
    LEADERLESS = "running without a coordinator"
    """Nobody leads for the moment: the nodes train on, and decisions wait."""
    ENDED = "ended"
    ABANDONED = "ended without an outcome"
    """It was interrupted, or its launcher died."""


@dataclass(frozen=True, slots=True)
class Progress:
    """How far the training is."""

    step: int
    """The newest step that passed, those of a loaded checkpoint included."""
    last_step: int
    samples: int
    saved_step: int | None
    loss: float | None = None
    """This and the following are of the newest step of this run, None before it."""
    learning_rate: float | None = None
    gradient_norm: float | None = None
    step_seconds: float | None = None
    median_step_seconds: float | None = None
    """Over the newest steps."""
    validation_loss: float | None = None
    """Of the newest evaluation on validation samples, None before it."""
    validation_step: int | None = None


@dataclass(frozen=True, slots=True)
class StageStatus:
    """One place of the table: who runs a stage, who holds its replica, and what is to change."""

    node: str
    shadow: str | None
    since_step: int
    """With or without a replica since this step had passed."""
    since_unix: float
    planned: tuple[str, ...] = ()
    """What a planned change makes of it."""
    is_held: bool = True
    """A live node has its state."""


@dataclass(frozen=True, slots=True)
class StandbyStatus:
    """A node that waits to take a place."""

    node: str
    pipeline: int | None = None
    """This and the stage: where it is to go, None while nothing is vacant."""
    stage: int | None = None
    is_ready: bool = False
    """It has built what it will hold there."""


@dataclass(frozen=True, slots=True)
class AwaitedStatus:
    """What a job waits for that nobody is left of."""

    there: tuple[str, ...]
    """The nodes that have come."""
    wanted: int
    """With so many it begins again at once."""
    seconds: float
    """So long it waits for the first ones."""


@dataclass(frozen=True, slots=True)
class LeavingStatus:
    """A node that is to leave, and is there still."""

    node: str
    notice: str
    """Why, and in what time where that is known."""


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """Who leads, or led last."""

    generation: int
    pid: int
    leads: bool
    silent_seconds: float
    address: str | None


@dataclass(frozen=True, slots=True)
class Totals:
    """What only grows."""

    takeovers: int
    changes: int
    restores: int
    """Returns of all to a checkpoint."""
    undone_steps: int
    undone_samples: int
    losses: tuple[Loss, ...]
    drained: int
    returned: int
    saves: int
    failed_saves: int


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job at one moment."""

    folder: str
    phase: Phase
    ending: str | None
    """How it ended, in words; None while it has not."""
    progress: Progress
    epoch: int | None
    coordinator: CoordinatorStatus | None
    pipelines: tuple[tuple[StageStatus, ...], ...]
    nodes: tuple[str, ...]
    """Those that train and were not lost."""
    awaited: AwaitedStatus | None
    """None where the job does not wait for nodes."""
    standbys: tuple[StandbyStatus, ...]
    leaving: tuple[LeavingStatus, ...]
    totals: Totals
    lines: tuple[str, ...]
    """What was said last, but for iterations."""

    @property
    def unprotected(self) -> tuple[tuple[int, int, StageStatus], ...]:
        """The stages that one node alone holds, each with its pipeline's and its own number."""
        return tuple(
            (number, stage, place)
            for number, stage, place in self._places()
            if place.is_held and place.shadow is None
        )

    @property
    def unheld(self) -> tuple[tuple[int, int], ...]:
        """The stages that no live node of their pipeline holds: its number and theirs."""
        return tuple(
            (number, stage) for number, stage, place in self._places() if not place.is_held
        )

    def _places(self) -> tuple[tuple[int, int, StageStatus], ...]:
        return tuple(
            (number, stage, place)
            for number, pipeline in enumerate(self.pipelines)
            for stage, place in enumerate(pipeline)
        )

    @property
    def is_over(self) -> bool:
        """Whether nothing more will come of it."""
        return self.phase in (Phase.ENDED, Phase.ABANDONED)

    def to_json(self) -> str:
        """All of it, for programs; a number that is none there (an overflow) is null."""
        return json.dumps(asdict(self, dict_factory=_finite), indent=2, allow_nan=False)


def _finite(pairs: Sequence[tuple[str, object]]) -> dict[str, object]:
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in pairs
    }
