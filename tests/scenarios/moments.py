"""The moments at which the sweep kills a node.

Just before a forward, a backward, a send and a receive of the first, a middle and the last
microbatch, on each stage, in both modes of redundancy, with one, two and three pipelines (with two
members a sum has the same bits in any order, so that some errors show only with three).
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass

from tiny_gpt import Shape

from megatron_bamboo.schedule.actions import Action, Op

MODES = ("lazy", "eager")
NUMBERS_OF_PIPELINES = (1, 2, 3)
FATAL_STEP = 2
SEED = 20251129


@dataclass(frozen=True, slots=True)
class Moment:
    """One case: this node dies just before this action."""

    shape: Shape
    redundancy: str
    pipeline: int
    action: Action

    @property
    def victim(self) -> str:
        """The node to die."""
        return self.shape.node(self.pipeline, self.action.stage)

    @property
    def injection(self) -> str:
        """As ``bamboo run --inject`` takes it."""
        return f"{self.victim}@iter{FATAL_STEP}:{self.action}"

    def __str__(self) -> str:
        return f"{self.shape}-{self.redundancy}-pipeline{self.pipeline}-{self.action}"


def full_part() -> list[Moment]:
    """Every moment, with two, three and four stages."""
    return [m for num_stages in (3, 2, 4) for m in _moments(num_stages)]


def ci_part() -> list[Moment]:
    """With three stages each stage, operation, mode and number of pipelines, at one microbatch."""
    by_stratum: dict[tuple[object, ...], list[Moment]] = {}
    for m in _moments(3):
        stratum = (m.action.stage, m.action.op, m.redundancy, m.shape.num_pipelines)
        by_stratum.setdefault(stratum, []).append(m)
    chosen = random.Random(SEED)
    return [chosen.choice(moments) for moments in by_stratum.values()]


PARTS = {"ci": ci_part, "full": full_part}


def _moments(num_stages: int) -> Iterator[Moment]:
    chosen = random.Random(f"{SEED} {num_stages}")
    for num_pipelines in NUMBERS_OF_PIPELINES:
        shape = Shape(num_stages, num_pipelines)
        microbatches = (0, shape.num_microbatches // 2, shape.num_microbatches - 1)
        for redundancy in MODES:
            for stage in range(num_stages):
                for op in _operations(stage, num_stages):
                    for microbatch in microbatches:
                        action = Action(stage, 0, op, microbatch)
                        yield Moment(shape, redundancy, chosen.randrange(num_pipelines), action)


def _operations(stage: int, num_stages: int) -> list[Op]:
    operations = [Op.F, Op.B]
    if stage > 0:
        operations += [Op.RECV_F, Op.SEND_B]
    if stage < num_stages - 1:
        operations += [Op.SEND_F, Op.RECV_B]
    return operations
