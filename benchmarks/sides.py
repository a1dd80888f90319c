"""The two sides that ``throughput.py`` times: what a process of each does.

Both train the same model on the same text with the same flags. Around a step is only the question
whose turn it is; the steps themselves are what each side's users get.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron_rank import MegatronRank
from parts import Stopwatches
from product_job import run_product, train
from turns import Rank

from megatron_bamboo.agent.environment import WorkerEnvironment
from megatron_bamboo.agent.job import Deadlines
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.config import check_options, parse_options
from megatron_bamboo.execution.executor import Executor

OURS, THEIRS = "ours", "Megatron-core"
# While the other side has its turn, no step of this one passes.
DEADLINES = Deadlines(stall_seconds=3600)


@dataclass(frozen=True, slots=True)
class Training:
    """What both sides train."""

    flags: tuple[str, ...]
    num_ranks: int
    num_steps: int
    folder: Path

    @property
    def turns(self) -> Path:
        """Where ranks ask for their turn."""
        return self.folder / "turns"

    @property
    def job_dir(self) -> Path:
        """What the product leaves."""
        return self.folder / "job"


def train_ours(training: Training) -> None:
    """Be the product's whole job."""

    def work() -> int:
        _take_turns(Rank(training.turns, OURS, int(WorkerEnvironment.read().node[4:])))
        return train(training.flags)

    outcome = run_product(training.flags, training.num_ranks, training.job_dir, work, DEADLINES)
    assert outcome.status is Status.FINISHED, outcome.message


def _take_turns(rank: Rank) -> None:
    """Run a step of this process's executor when it is this side's turn."""
    forward_backward, finish = Executor.forward_backward_func, Executor.finish_step
    losses: list[float] = []

    def begin(executor: Executor, **arguments: Any) -> list[Any]:
        rank.await_turn()
        reports = forward_backward(executor, **arguments)
        losses[:] = _losses(reports)
        return reports

    def end(executor: Executor) -> tuple[float, ...]:
        vector = finish(executor)
        rank.step_is_over(losses)
        return vector

    Executor.forward_backward_func = begin  # type: ignore[method-assign]
    Executor.finish_step = end  # type: ignore[method-assign]


def train_theirs(training: Training, number: int, with_parts: bool) -> None:
    """Be one of Megatron's ranks; a session of its own, to the scheduler, as a node of ours is."""
    os.setsid()
    options = parse_options(training.flags)
    layout = check_options(options, training.num_ranks)
    trained = MegatronRank(options, layout, number, training.folder / "rendezvous")
    parts = Stopwatches.attach(trained) if with_parts else None
    rank = Rank(training.turns, THEIRS, number)
    for step in range(1, training.num_steps + 1):
        rank.await_turn()
        reports = trained.forward_backward(step)
        trained.apply()
        rank.step_is_over(_losses(reports), parts.take() if parts else {})
    dist.barrier()


def _losses(reports: list[Any]) -> list[float]:
    return [float(report["lm loss"]) for report in reports]
