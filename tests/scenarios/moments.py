"""The moments at which the sweep kills a node, each just before an action of its program.

A part of the sweep is a list of campaigns: a job, and which actions of its schedule are a node's
last. Only what the product's own schedule holds is planned, so no moment is planned that never
comes. Jobs have one, two and three pipelines: with two members a sum has the same bits in any
order, so that some errors show only with three.
"""

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from tiny_gpt import Shape

from megatron_bamboo.schedule.actions import (
    COMPUTE_OPS,
    GATHER_OPS,
    RECEIVE_OPS,
    SEND_OPS,
    TAIL_OPS,
    Action,
    Op,
)
from megatron_bamboo.schedule.redundancy import Redundancy

MODES = (Redundancy.LAZY, Redundancy.EAGER)
MODES_WITH_REPLICAS = (*MODES, Redundancy.BUBBLE)
FATAL_STEP = 2
SEED = 20251129
MIRROR_OPS = frozenset({Op.SEND_MIRROR, Op.RECV_MIRROR})
ALL_OPS = (COMPUTE_OPS | SEND_OPS | RECEIVE_OPS) - MIRROR_OPS
# Late in a stage's part of the iteration, a victim had more and more in mirrors.
LATE_OPS = MIRROR_OPS | {Op.B, Op.SEND_B, Op.RECV_B}


@dataclass(frozen=True, slots=True)
class Moment:
    """One case: this node dies just before this action."""

    shape: Shape
    redundancy: Redundancy
    pipeline: int
    action: Action

    @property
    def victim(self) -> str:
        """The node to die: the one that runs the action."""
        rank = self.shape.schedule(self.redundancy).rank_of(self.action)
        assert rank is not None
        return self.shape.node(self.pipeline, rank)

    @property
    def injection(self) -> str:
        """As ``bamboo run --inject`` takes it."""
        return f"{self.victim}@iter{FATAL_STEP}:{self.action}"

    def __str__(self) -> str:
        return f"{self.shape}-{self.redundancy}-pipeline{self.pipeline}-{self.action}"


class Pick(StrEnum):
    """Which of the actions that differ in nothing but the microbatch."""

    FIRST = "first"
    MIDDLE = "middle"
    LAST = "last"
    DRAWN = "drawn"  # one by lot
    EVERY = "every"  # in every pipeline, else in one by lot

    def of(self, actions: Sequence[Action], lot: random.Random) -> Sequence[Action]:
        """The chosen of the actions, which are in the order of their microbatches."""
        match self:
            case Pick.FIRST:
                return actions[:1]
            case Pick.MIDDLE:
                return [actions[len(actions) // 2]]
            case Pick.LAST:
                return actions[-1:]
            case Pick.DRAWN:
                return [lot.choice(actions)]
            case Pick.EVERY:
                return actions


@dataclass(frozen=True, slots=True)
class Campaign:
    """One job, lost a node at each of some of its actions."""

    shape: Shape
    redundancy: Redundancy
    picks: tuple[Pick, ...]
    ops: frozenset[Op] = ALL_OPS

    def moments(self) -> Iterator[Moment]:
        """By operation, stage and chunk, and there by microbatch."""
        lot = random.Random(f"{SEED} {self.shape} {self.redundancy}")
        pipelines = range(self.shape.num_pipelines)
        for actions in self._kinds():
            chosen = {action for pick in self.picks for action in pick.of(actions, lot)}
            for action in sorted(chosen):
                hit = pipelines if Pick.EVERY in self.picks else [lot.choice(pipelines)]
                for pipeline in hit:
                    yield Moment(self.shape, self.redundancy, pipeline, action)

    def _kinds(self) -> Iterator[list[Action]]:
        """The actions of a pipeline, those together that differ only in the microbatch."""
        programs = self.shape.whole_schedule(self.redundancy).programs
        actions = sorted(a for program in programs for a in program if a.op in self.ops)
        for _, kind in itertools.groupby(actions, lambda a: (a.stage, a.chunk, a.op)):
            yield list(kind)


@dataclass(frozen=True, slots=True)
class OneOf:
    """Several campaigns that differ in the mode, each kind of action in one of them by lot."""

    campaigns: tuple[Campaign, ...]

    def moments(self) -> Iterator[Moment]:
        """By operation, stage and chunk."""
        # Not by their text: the order of a set of operations differs from process to process.
        lot = random.Random(f"{SEED} {[f'{one.shape} {one.redundancy}' for one in self.campaigns]}")
        kinds: dict[tuple[Op, int, int | None], list[Moment]] = {}
        for moment in (moment for campaign in self.campaigns for moment in campaign.moments()):
            action = moment.action
            kinds.setdefault((action.op, action.stage, action.chunk), []).append(moment)
        for _, moments in sorted(kinds.items(), key=lambda kind: kind[1][0].action):
            yield lot.choice(moments)


ENDS = (Pick.FIRST, Pick.MIDDLE, Pick.LAST)
PLAIN_OPS = ALL_OPS - {Op.RF}
PLAIN = [
    Campaign(Shape(num_stages, num_pipelines), mode, ENDS, PLAIN_OPS)
    for num_stages in (3, 2, 4)
    for num_pipelines in (1, 2, 3)
    for mode in MODES
]
PLAIN_DRAWN = [
    OneOf(
        tuple(
            Campaign(Shape(3, number), mode, (Pick.DRAWN,), PLAIN_OPS)
            for number in (1, 3)
            for mode in MODES
        ),
    )
]


def _interleaved(
    num_pipelines: int, tensor_size: int = 1, variant: str = "", num_mirrors: int = 0
) -> Shape:
    return Shape(
        3,
        num_pipelines,
        num_steps=4,
        variant=variant,
        num_chunks=2,
        tensor_size=tensor_size,
        num_mirrors=num_mirrors,
    )


# Each tensor parallel job has a half of a stratum, and the other variant the other half.
INTERLEAVED = [
    Campaign(_interleaved(3), Redundancy.BUBBLE, (Pick.EVERY,)),
    *(Campaign(_interleaved(1), mode, (Pick.EVERY,)) for mode in MODES_WITH_REPLICAS),
    *(Campaign(_interleaved(2), mode, ENDS) for mode in MODES_WITH_REPLICAS),
    Campaign(_interleaved(2, 2), Redundancy.EAGER, (Pick.FIRST, Pick.LAST)),
    Campaign(_interleaved(2, 2, "sequence-parallel"), Redundancy.EAGER, (Pick.MIDDLE,)),
    Campaign(_interleaved(1, 2), Redundancy.BUBBLE, (Pick.MIDDLE,)),
    Campaign(_interleaved(1, 2, "sequence-parallel"), Redundancy.BUBBLE, (Pick.FIRST, Pick.LAST)),
]
INTERLEAVED_DRAWN = [
    OneOf(
        tuple(
            Campaign(Shape(2, 1, num_steps=4, num_chunks=2), mode, (Pick.DRAWN,))
            for mode in MODES_WITH_REPLICAS
        ),
    )
]
MIRRORED = [
    *(Campaign(Shape(3, 1, num_mirrors=2), mode, ENDS, LATE_OPS) for mode in MODES),
    *(Campaign(Shape(3, 2, num_mirrors=3), mode, ENDS, LATE_OPS) for mode in MODES),
    *(
        Campaign(_interleaved(1, num_mirrors=2), mode, (Pick.MIDDLE, Pick.LAST), LATE_OPS)
        for mode in MODES_WITH_REPLICAS
    ),
    Campaign(_interleaved(2, num_mirrors=3), Redundancy.LAZY, (Pick.LAST,), LATE_OPS),
    Campaign(_interleaved(1, 2, num_mirrors=2), Redundancy.BUBBLE, (Pick.LAST,), LATE_OPS),
    Campaign(Shape(3, 2, variant="bf16", num_mirrors=3), Redundancy.LAZY, (Pick.LAST,), LATE_OPS),
]
MIRRORED_DRAWN = [
    Campaign(Shape(3, 2, num_mirrors=2), Redundancy.LAZY, (Pick.LAST,), MIRROR_OPS | {Op.B}),
    Campaign(
        Shape(2, 1, num_steps=4, num_chunks=2, num_mirrors=3),
        Redundancy.EAGER,
        (Pick.DRAWN,),
        MIRROR_OPS,
    ),
]


def _tail(num_stages: int, num_pipelines: int, variant: str, mode: Redundancy) -> Campaign:
    shape = Shape(num_stages, num_pipelines, num_steps=4, variant=variant)
    return Campaign(shape, mode, (Pick.EVERY,), TAIL_OPS)


# With four stages some workers are not hit by a loss in a gather and have begun the next step. Who
# has begun it may be lost before others have all that it gave to them.
TAIL = [
    *(
        _tail(2, num_pipelines, variant, mode)
        for variant in ("", "bf16", "zero", "zero-bf16")
        for num_pipelines, mode in ((2, Redundancy.LAZY), (3, Redundancy.EAGER))
    ),
    *(_tail(2, 1, variant, Redundancy.EAGER) for variant in ("", "bf16")),
    _tail(2, 3, "verify", Redundancy.LAZY),
    _tail(2, 2, "zero-verify", Redundancy.EAGER),
    _tail(3, 2, "zero", Redundancy.BUBBLE),
    Campaign(
        Shape(4, 2, num_steps=4, variant="zero"),
        Redundancy.LAZY,
        (Pick.EVERY,),
        GATHER_OPS | {Op.STEP},
    ),
    Campaign(
        Shape(2, 3, num_steps=4, variant="zero"),
        Redundancy.LAZY,
        (Pick.FIRST,),
        ALL_OPS - {Op.RF},
    ),
]
TAIL_DRAWN = [
    Campaign(
        Shape(2, num_pipelines, num_steps=4, variant=variant),
        mode,
        (Pick.DRAWN,),
        GATHER_OPS | {Op.STEP, Op.RECV_REFRESH},
    )
    for num_pipelines, variant, mode in (
        (2, "zero", Redundancy.LAZY),
        (3, "zero-bf16", Redundancy.EAGER),
    )
]
# The parts of CI hold one microbatch, pipeline and mode, of one of its shapes, of each operation,
# stage and chunk.
PARTS: dict[str, Sequence[Campaign | OneOf]] = {
    "ci": PLAIN_DRAWN,
    "ci-interleaved": INTERLEAVED_DRAWN,
    "ci-mirrored": MIRRORED_DRAWN,
    "full": PLAIN,
    "interleaved": INTERLEAVED,
    "ci-tail": TAIL_DRAWN,
    "tail": TAIL,
    "mirrored": MIRRORED,
}


def moments_of(part: str) -> list[Moment]:
    """Everything that a part plans."""
    return [moment for campaign in PARTS[part] for moment in campaign.moments()]
