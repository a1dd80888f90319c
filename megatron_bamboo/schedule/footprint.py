"""What a worker's tensors take in memory, from the sizes of its stages and its program.

The program is walked action by action: a forward saves what its backward needs, outputs, gradients
and messages are kept until the step, state is there all the time. So the peak is known before
anything runs. What an action needs only while it runs is not in it, nor what the allocator, the
libraries and the processes take beside tensors.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

from megatron_bamboo.schedule.actions import Action, Op
from megatron_bamboo.schedule.mirrors import MIRRORS_KEPT
from megatron_bamboo.schedule.schedule import Schedule


class Category(StrEnum):
    """What memory is for."""

    PARAMETERS = "parameters"
    GRADIENTS = "gradients"
    OPTIMIZER = "optimizer state"
    REPLICA = "replica"
    MESSAGES = "message log"
    ACTIVATIONS = "activations"
    REDUNDANT = "redundant activations"


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Bytes of one chunk."""

    forward: int
    """What one forward saves for its backward."""
    mirror: int
    """A mirror of its gradients."""


@dataclass(frozen=True, slots=True)
class StageSizes:
    """Bytes of one stage on one worker, as primary or as replica."""

    parameters: int
    gradients: int
    """As accumulated, and as reduced."""
    optimizer: int
    stepped: int
    """The part of the reduced gradient that a worker steps: what its replica is sent."""
    tied: int
    """The gradient of its role of the tied embedding; 0 if it has none."""
    chunks: tuple[ChunkSizes, ...]


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one worker needs, by category."""

    at_peak: Mapping[Category, int]
    """When the device holds most."""
    largest: Mapping[Category, int]
    """Each when it takes most by itself."""
    where: Action
    """The action after which the peak is."""


def footprint(
    schedule: Schedule,
    rank: int,
    stages: Sequence[StageSizes],
    message: int,
    keeps_redundant: bool = True,
    on_host: bool = False,
) -> Footprint:
    """What a rank needs in a step of a schedule with its tail.

    Args:
        stages: the sizes of every stage of the pipeline.
        message: an output of a chunk, and a gradient of one.
        keeps_redundant: whether redundant forwards save anything.
        on_host: what they save is in host memory.
    """
    walk = _Walk(schedule, rank, stages, message, keeps_redundant, on_host)
    # After a new plan, and in the second step, what was sent in the step before is kept, too.
    walk.run()
    walk.now[Category.MESSAGES] = walk.sent
    return walk.run()


def held_by_device(sizes: Mapping[Category, int], on_host: bool) -> int:
    """All together, without redundant activations if these are in host memory."""
    return sum(sizes.values()) - (sizes.get(Category.REDUNDANT, 0) if on_host else 0)


class _Walk:
    """A worker's memory from action to action."""

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        stages: Sequence[StageSizes],
        message: int,
        keeps_redundant: bool,
        on_host: bool,
    ) -> None:
        self._schedule = schedule
        self._program = schedule.programs[rank]
        self._stages = stages
        self._message = message
        self._keeps_redundant = keeps_redundant
        self._on_host = on_host
        own = [stages[stage] for stage in schedule.stages_of(rank)]
        replicas = [stages[stage] for stage in schedule.replicas_of(rank)]
        self.now: Counter[Category] = Counter(
            {
                Category.PARAMETERS: sum(stage.parameters for stage in own),
                Category.GRADIENTS: sum(stage.gradients for stage in own),
                Category.OPTIMIZER: sum(stage.optimizer for stage in own),
                Category.REPLICA: sum(s.parameters + s.gradients + s.optimizer for s in replicas),
            }
        )
        self.sent = 0

    def run(self) -> Footprint:
        """One step; its peak."""
        self.sent = 0
        mirrors: Counter[tuple[int, int | None]] = Counter()
        largest: Counter[Category] = Counter()
        peak, most, where = Counter[Category](), 0, self._program[0]
        for action in self._program:
            if action.op is Op.RECV_MIRROR:
                kept = (action.stage, action.chunk)
                mirrors[kept] += 1
                if mirrors[kept] > MIRRORS_KEPT:
                    continue
            self._perform(action)
            largest |= self.now
            if (held := held_by_device(self.now, self._on_host)) > most:
                peak, most, where = self.now.copy(), held, action
        return Footprint(_by_category(peak), _by_category(largest), where)

    def _perform(self, action: Action) -> None:
        now, stage = self.now, self._stages[action.stage]
        match action.op:
            case Op.F | Op.RF:
                self._run_forward(action)
            case Op.B:
                now[Category.ACTIVATIONS] -= self._saved(action)
                if self._schedule.upstream(action, Op.B) is not None:
                    now[Category.MESSAGES] += self._message
            case Op.SEND_F | Op.SEND_B:
                self.sent += self._message
            case Op.RECV_F | Op.RECV_B:
                now[Category.MESSAGES] += self._message
            case Op.RECV_MIRROR:
                assert action.chunk is not None
                now[Category.MESSAGES] += stage.chunks[action.chunk].mirror
            case Op.REDUCE:
                now[Category.MESSAGES] += stage.tied
            case Op.TIE:
                other = self._schedule.num_stages - 1 - action.stage
                is_remote = (
                    self._schedule.placement[other] != self._schedule.placement[action.stage]
                )
                now[Category.MESSAGES] += stage.tied * is_remote
            case Op.SEND_TIE:
                self._send(stage.tied)
            case Op.SEND_REFRESH:
                self._send(stage.stepped)
            case Op.RECV_REFRESH:
                now[Category.MESSAGES] += stage.stepped
            case Op.STEP:
                now[Category.MESSAGES] = now[Category.REDUNDANT] = 0
            case _:
                pass

    def _run_forward(self, action: Action) -> None:
        if action.op is Op.F:
            self.now[Category.ACTIVATIONS] += self._saved(action)
        elif self._keeps_redundant:
            self.now[Category.REDUNDANT] += self._saved(action)
        if self._schedule.downstream(action, Op.F) is not None:
            self.now[Category.MESSAGES] += self._message

    def _saved(self, action: Action) -> int:
        assert action.chunk is not None
        return self._stages[action.stage].chunks[action.chunk].forward

    def _send(self, copied: int) -> None:
        """A copy is sent, and kept until the step."""
        self.now[Category.MESSAGES] += copied
        self.sent += copied


def _by_category(sizes: Mapping[Category, int]) -> dict[Category, int]:
    return {category: sizes.get(category, 0) for category in Category}
