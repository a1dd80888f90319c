"""Draws the faults of rehearsal runs by lot: a pure function of the seed.

What a job survives depends on how losses follow each other, so they come far apart (the job is
whole again), in the next step or in the same one (during a takeover, before there is a new
replica). Now and then a stage's two holders go at once. A job of one pipeline does not survive
that, and must say so: there the run's faults end with it.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import islice

from megatron_bamboo.agent.job import Injection, JobShape, WriteFault
from megatron_bamboo.membership.lives import next_life
from megatron_bamboo.rehearsal.fault import LOSSES, REPLICA, Fault, How, Nth
from megatron_bamboo.schedule.actions import Action, Op

# How a loss follows the one before, with the parts that each has.
_APART, _NEXT_STEP, _SAME_STEP = 0.6, 0.2, 0.2
_BOTH_HOLDERS = 0.03


class OnCoordinator(StrEnum):
    """What happens to the coordinator."""

    KILL = "kill-coordinator"
    """It is killed just before or just after it writes that an epoch ends, or a plan."""
    STOP = "stop-coordinator"
    """It is stopped, until another one has taken its place, and woken later."""


KINDS: tuple[How | OnCoordinator, ...] = (*LOSSES, *OnCoordinator)
VERIFIED_KINDS = (*KINDS, How.FLIP)
"""All that there are where copies of the state are compared: a flip is found only there."""
# What a flip changes lasts until it is compared, and is not what redundant forwards read.
_FLIPPED = f"{REPLICA}/exp_avg"
# A copy is mended after the step in which it was compared, and is whole again in the next.
_STEPS_TO_MEND = 2


@dataclass(frozen=True, slots=True)
class Drawn:
    """What strikes in one run."""

    injections: tuple[Injection, ...]
    write_faults: tuple[WriteFault, ...] = ()
    stops: tuple[int, ...] = ()
    """The steps in which the coordinator is stopped."""

    @property
    def injected(self) -> tuple[str, ...]:
        """As ``bamboo run --inject`` takes them."""
        return tuple(map(str, (*self.injections, *self.write_faults)))


@dataclass(frozen=True, slots=True)
class Lottery:
    """What runs are drawn from."""

    shape: JobShape
    kinds: Sequence[How | OnCoordinator]
    per_run: int
    """Faults of a run, at most; a stage's two holders at once count as one."""
    apart: int
    """Steps after which a job has healed from a loss."""
    num_standbys: int = 0
    respawns: bool = False
    """A lost node is started again, as a standby."""
    verified_every: int = 0
    """In how many steps copies are compared once; 0 for never."""

    def run(self, seed: int, number: int) -> Drawn:
        """What strikes in the run of this number."""
        return _Draw(self, random.Random(f"{seed} {number}"), number).all()


class _Draw:
    """The faults of one run, as they are drawn."""

    def __init__(self, lottery: Lottery, lot: random.Random, number: int) -> None:
        self._lottery = lottery
        self._lot = lot
        # So that all kinds come equally often, whatever the seed.
        self._next_kind = number * lottery.per_run
        arrangement = lottery.shape.arrangement
        names = iter(f"node{n}" for n in range(arrangement.num_nodes + lottery.num_standbys))
        self._pipelines = [list(islice(names, p.num_stages)) for p in arrangement.pipelines]
        self._ranks = {node: r for nodes in self._pipelines for r, node in enumerate(nodes)}
        self._flipped: set[str] = set()
        self._waiting = list(names)
        """The standbys, in the order in which they take places."""
        self._recent: list[str] = []
        """Lost since the job was whole, as far as can be known."""
        self._uncertain: set[str] = set()
        """Came, or will, at about the same time as others: which place it has nobody can know."""
        self._step = lottery.shape.start_step + lot.randint(2, 3)
        self._injections: list[Injection] = []
        self._write_faults: list[WriteFault] = []
        self._stops: list[int] = []

    def all(self) -> Drawn:
        """One after another, until the run's last step is near or nobody can be spared."""
        for _ in range(self._lottery.per_run):
            if self._step >= self._lottery.shape.train_iters or not self._strike():
                break
        return Drawn(tuple(self._injections), tuple(self._write_faults), tuple(self._stops))

    def _strike(self) -> bool:
        """Draw one fault; whether more may follow."""
        kinds = self._lottery.kinds
        kind = kinds[self._next_kind % len(kinds)]
        self._next_kind += 1
        match kind:
            case OnCoordinator.KILL:
                self._kill_coordinator()
                return True
            case OnCoordinator.STOP:
                self._stops.append(self._step)
                self._step += 1
                return True
            case How.FLIP:
                return self._flip_a_bit()
            case _:
                return self._lose_node(kind)

    def _kill_coordinator(self) -> None:
        """At a write of the next epoch that ends: each loss ends one."""
        num_losses = sum(one.fault.how is not How.FLIP for one in self._injections)
        epoch = max(num_losses, len(self._write_faults))
        key = self._lot.choice((f"ending/{epoch}", f"plan/{epoch + 1}"))
        self._write_faults.append(WriteFault(self._lot.choice(("before", "after")), key))

    def _lose_node(self, how: How) -> bool:
        if not list(self._survivable()):
            self._wait_until_healed()
        free = list(self._survivable())
        if not free or self._step >= self._lottery.shape.train_iters:
            return False
        node = self._lot.choice(free)
        self._injections.append(self._injection(node, how))
        known = {node, self._next_of(node)} - self._uncertain - self._flipped
        if len(known) == 2 and self._lot.random() < _BOTH_HOLDERS:
            return self._lose_next_of(node, how)
        self._count_as_lost(node)
        self._go_on()
        return True

    def _lose_next_of(self, node: str, how: How) -> bool:
        """The other holder of a node's stage, at the same time.

        What is left of the pipeline gets its state from another one, with other ranks perhaps.
        """
        # An error that both raise is the script's own, and ends the job as such.
        self._injections.append(
            self._injection(self._next_of(node), How.KILL if how is How.RAISE else how)
        )
        if len(self._pipelines) == 1:
            return False
        pipeline = self._pipeline_of(node)
        self._uncertain.update(pipeline)
        for one in (node, self._next_of(node)):
            self._count_as_lost(one)
        self._wait_until_healed()
        return True

    def _count_as_lost(self, node: str) -> None:
        self._recent.append(node)
        if self._lottery.respawns:
            self._waiting.append(next_life(node))

    def _flip_a_bit(self) -> bool:
        """In the replica of a node, just before it is compared.

        So the right copy is known: of two that differ the primary's counts. The job must be whole,
        for of the only copies that are left nobody may have the right one.
        """
        if self._recent:
            self._wait_until_healed()
        every = self._lottery.verified_every
        step = -(-self._step // every) * every
        if step >= self._lottery.shape.train_iters:
            return False
        known = [node for nodes in self._pipelines if len(nodes) > 1 for node in nodes]
        free = [node for node in known if node not in self._uncertain | self._flipped]
        if free:
            node = self._lot.choice(free)
            verify = Action(self._ranks[node], None, Op.VERIFY, None)
            self._injections.append(Injection(node, Fault(step, verify, How.FLIP, _FLIPPED)))
            self._flipped.add(node)
            self._step = step + _STEPS_TO_MEND
        return True

    def _injection(self, node: str, how: How) -> Injection:
        number = self._pipelines.index(self._pipeline_of(node))
        shape = self._lottery.shape.arrangement.pipelines[number]
        # About as many actions as a worker has in a step.
        actions = 4 * shape.num_microbatches * shape.num_chunks + 4
        return Injection(node, Fault(self._step, Nth(self._lot.randint(1, actions)), how))

    def _survivable(self) -> Iterator[str]:
        """The nodes whose loss can be survived after the recent ones, wherever they are."""
        spared = {neighbour for node in self._recent for neighbour in self._neighbours(node)}
        if self._recent:
            spared |= self._uncertain
        spared |= self._flipped  # a node can have only one fault
        for pipeline in self._pipelines:
            if len(pipeline) > 1:
                yield from (node for node in pipeline if node not in spared)

    def _go_on(self) -> None:
        """To the step of the next loss."""
        (way,) = self._lot.choices(("apart", "next", "same"), (_APART, _NEXT_STEP, _SAME_STEP))
        if way == "apart" or self._recent[-1] in self._uncertain:
            self._wait_until_healed()
        else:
            self._step += way == "next"

    def _wait_until_healed(self) -> None:
        """Standbys take the places of the lost; without one a place goes."""
        recent = set(self._recent)
        if len(recent) > 1:
            self._uncertain.update(map(next_life, recent))
        for pipeline in self._pipelines:
            for node in [node for node in pipeline if node in recent]:
                place = pipeline.index(node)
                new = [self._waiting.pop(0)] if self._waiting else []
                pipeline[place : place + 1] = new
                self._ranks.update(dict.fromkeys(new, self._ranks[node]))
                if len(recent) > 1 or recent & self._uncertain:
                    self._uncertain.update(new)
        self._recent.clear()
        self._step += self._lottery.apart + self._lot.randint(0, self._lottery.apart // 2)

    def _neighbours(self, node: str) -> set[str]:
        """A lost node, and those before and after it, without which its stages have no holder."""
        pipeline = self._pipeline_of(node)
        place, size = pipeline.index(node), len(pipeline)
        return {pipeline[(place + offset) % size] for offset in (-1, 0, 1)}

    def _next_of(self, node: str) -> str:
        pipeline = self._pipeline_of(node)
        return pipeline[(pipeline.index(node) + 1) % len(pipeline)]

    def _pipeline_of(self, node: str) -> list[str]:
        return next(pipeline for pipeline in self._pipelines if node in pipeline)
