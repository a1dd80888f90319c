"""What has happened in a job, summed up from what its coordinators have said into the store.

All that was said stays there, each fact once, whichever coordinator said it. So whoever begins to
read it anew comes to the same numbers, and none of them ever falls.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from megatron_bamboo.evaluation.due import Kind
from megatron_bamboo.evaluation.outcome import Evaluated
from megatron_bamboo.membership.lives import last_life
from megatron_bamboo.planner.plan import PipelinePlan
from megatron_bamboo.watching.loss_kinds import LossKind, kind_of

KEPT_LINES = 10
"""So many of the newest lines are kept."""


@dataclass(frozen=True, slots=True)
class Loss:
    """A node that was lost."""

    node: str
    cause: str
    unix: float

    @property
    def kind(self) -> LossKind:
        """What showed it."""
        return kind_of(self.cause)


@dataclass(frozen=True, slots=True)
class Protection:
    """Whether a stage has a replica, and since when that is so."""

    has_replica: bool
    since_step: int
    """The newest step that had passed when it came to this."""
    since_unix: float


@dataclass(frozen=True, slots=True)
class History:
    """All that was said so far."""

    step: int = 0
    """The newest step that was said to have passed; 0 before the first."""
    pipelines: tuple[PipelinePlan, ...] = ()
    """Who runs and holds what, by the newest plan or the change that was made since."""
    protection: tuple[tuple[Protection, ...], ...] = ()
    """By pipeline and stage."""
    changed_epoch: int = -1
    """The newest epoch whose planned change is made."""
    losses: tuple[Loss, ...] = ()
    takeovers: int = 0
    """Stages that a shadow has taken over."""
    changes: int = 0
    """Planned changes that were made."""
    restores: int = 0
    """Returns of all to a checkpoint."""
    undone_steps: int = 0
    """Steps that had passed and are done again since."""
    undone_samples: int = 0
    """Of these steps."""
    drained: int = 0
    """Nodes that left without a loss."""
    returned: int = 0
    """Lost or drained nodes that joined again."""
    saves: int = 0
    failed_saves: int = 0
    saved_step: int | None = None
    """The newest step that was saved."""
    validation: Evaluated | None = None
    """The newest evaluation on validation samples."""
    lines: tuple[str, ...] = ()
    """The newest lines that tell of no iteration."""

    def after(self, facts: Iterable[Mapping[str, Any]]) -> "History":
        """The history with some more facts, in the order in which they were said."""
        history = self
        for fact in facts:
            if (event := fact.get("event")) is not None:
                history = _after_event(history, event)
            elif (loss := fact.get("loss")) is not None:
                history = replace(history, step=max(history.step, loss["step"]))
            else:
                lines = (*history.lines, fact["line"])[-KEPT_LINES:]
                history = replace(history, lines=lines)
        return history


def _after_event(history: History, event: Mapping[str, Any]) -> History:
    match event["event"]:
        case "plan":
            return _after_plan(history, event)
        case "changed":
            arranged = _arranged(history, _pipelines(event), event["unix"])
            return replace(arranged, changes=history.changes + 1, changed_epoch=event["epoch"])
        case "restored":
            return replace(
                history,
                restores=history.restores + 1,
                undone_steps=history.undone_steps + event["undone_steps"],
                undone_samples=history.undone_samples + event["undone_samples"],
            )
        case "loss":
            loss = Loss(event["node"], event["cause"], event["unix"])
            return replace(history, losses=(*history.losses, loss))
        case "drained":
            return replace(history, drained=history.drained + 1)
        case "agent_joined" if last_life(event["node"]) is not None:
            return replace(history, returned=history.returned + 1)
        case "evaluation" if event["kind"] != Kind.TEST:
            return replace(history, validation=Evaluated.from_fields(event))
        case "checkpoint" if event["failure"] is None:
            return replace(history, saves=history.saves + 1, saved_step=event["step"])
        case "checkpoint":
            return replace(history, failed_saves=history.failed_saves + 1)
    return history


def _after_plan(history: History, event: Mapping[str, Any]) -> History:
    """Where a plan follows a loss, stages of the lost may run where their replicas were."""
    pipelines, lost = _pipelines(event), set(event["lost"])
    # Not strict: plans are compared only as far as they have the same places.
    takeovers = sum(
        event.get("restored") is None and old in lost and new == shadow
        for before, after in zip(history.pipelines, pipelines, strict=False)
        for old, shadow, new in zip(before.stages, before.replicas, after.stages, strict=False)
    )
    arranged = _arranged(history, pipelines, event["unix"])
    return replace(arranged, takeovers=history.takeovers + takeovers)


def _arranged(history: History, pipelines: Sequence[PipelinePlan], unix: float) -> History:
    protection = tuple(
        tuple(
            _protection(history, number, stage, holder is not None, unix)
            for stage, holder in enumerate(pipeline.replicas)
        )
        for number, pipeline in enumerate(pipelines)
    )
    return replace(history, pipelines=tuple(pipelines), protection=protection)


def _protection(
    history: History, number: int, stage: int, has_replica: bool, unix: float
) -> Protection:
    known = history.protection[number : number + 1]
    if known and stage < len(known[0]) and known[0][stage].has_replica == has_replica:
        return known[0][stage]
    return Protection(has_replica, history.step, unix)


def _pipelines(event: Mapping[str, Any]) -> tuple[PipelinePlan, ...]:
    return tuple(map(PipelinePlan.from_fields, event["pipelines"]))
