"""Draws the faults of rehearsal runs by lot: a pure function of the seed.

What a job survives depends on how losses follow each other, so they come far apart (the job is
whole again), in the next step or in the same one (during a takeover, before there is a new
replica). Now and then a run ends with a stage's two holders at once, which no job survives: it must
then say so.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from megatron_bamboo.agent.job import Injection, JobShape
from megatron_bamboo.rehearsal.fault import Fault, How, Nth

# How a loss follows the one before, with the parts that each has.
_APART, _NEXT_STEP, _SAME_STEP = 0.6, 0.2, 0.2
_BOTH_HOLDERS = 0.04


@dataclass(frozen=True, slots=True)
class Lottery:
    """What runs are drawn from."""

    shape: JobShape
    kinds: Sequence[How]
    per_run: int
    """Faults of a run, at most."""
    apart: int
    """Steps after which a job has healed from a loss."""

    def run(self, seed: int, number: int) -> tuple[Injection, ...]:
        """The faults of the run of this number."""
        return tuple(_Draw(self, random.Random(f"{seed} {number}"), number).faults())


class _Draw:
    """The faults of one run, as they are drawn."""

    def __init__(self, lottery: Lottery, lot: random.Random, number: int) -> None:
        self._lottery = lottery
        self._lot = lot
        # So that all kinds come equally often, whatever the seed.
        self._next_kind = number * lottery.per_run
        size = lottery.shape.num_stages
        self._pipelines = [
            [f"node{pipeline * size + stage}" for stage in range(size)]
            for pipeline in range(lottery.shape.num_pipelines)
        ]
        self._recent: list[str] = []
        """Lost since the job was whole, as far as can be known."""

    def faults(self) -> Iterator[Injection]:
        """One after another, until the run's last step is near or nobody can be spared."""
        step = self._lottery.shape.start_step + self._lot.randint(2, 3)
        for _ in range(self._lottery.per_run):
            node = self._victim()
            if node is None or step >= self._lottery.shape.train_iters:
                return
            yield self._fault(node, step)
            if self._lot.random() < _BOTH_HOLDERS:
                yield self._fault(self._next_of(node), step)
                return
            self._lose(node)
            step += self._gap()

    def _fault(self, node: str, step: int) -> Injection:
        kinds = self._lottery.kinds
        how = kinds[self._next_kind % len(kinds)]
        self._next_kind += 1
        return Injection(node, Fault(step, Nth(self._lot.randint(1, self._num_actions())), how))

    def _num_actions(self) -> int:
        """About as many actions as a worker has in a step."""
        shape = self._lottery.shape
        return 4 * shape.num_microbatches * shape.num_chunks + 4

    def _victim(self) -> str | None:
        """A node whose loss can be survived after the recent ones."""
        spared = {neighbour for node in self._recent for neighbour in self._neighbours(node)}
        free = [
            node
            for pipeline in self._pipelines
            if len(pipeline) > 1
            for node in pipeline
            if node not in spared
        ]
        return self._lot.choice(free) if free else None

    def _lose(self, node: str) -> None:
        self._recent.append(node)

    def _gap(self) -> int:
        """Steps to the next loss; where they are many the lost nodes' places are given away."""
        apart = self._lottery.apart
        (way,) = self._lot.choices(("apart", "next", "same"), (_APART, _NEXT_STEP, _SAME_STEP))
        if way == "apart":
            for node in self._recent:
                next(pipe for pipe in self._pipelines if node in pipe).remove(node)
            self._recent.clear()
            return apart + self._lot.randint(0, apart // 2)
        return 1 if way == "next" else 0

    def _neighbours(self, node: str) -> set[str]:
        """A lost node, and those before and after it, without which its stages have no holder."""
        pipeline = next(pipe for pipe in self._pipelines if node in pipe)
        place, size = pipeline.index(node), len(pipeline)
        return {pipeline[(place + offset) % size] for offset in (-1, 0, 1)}

    def _next_of(self, node: str) -> str:
        pipeline = next(pipe for pipe in self._pipelines if node in pipe)
        return pipeline[(pipeline.index(node) + 1) % len(pipeline)]
