"""Our evaluations against Megatron-core's own ``forward_only`` passes, on its own schedules.

The parameters are those of a training in which gradients and state are equal bit for bit, so the
losses of the evaluations must be too: each microbatch's, and with it their mean.
"""

from functools import reduce
from multiprocessing.context import ForkServerContext
from operator import add
from pathlib import Path

import pytest
from in_ci import several_in_ci
from processes import run_processes
from trained_stages import Job, load_stages

from megatron_bamboo.observe.saved_run import open_run

FLAGS = ("--split", "60,30,10", "--eval-interval", "2", "--eval-iters", "2")
# Stages, pipelines, microbatches, chunks.
SHAPES = [(2, 2, 2, 2), (2, 1, 3, 1), (4, 1, 2, 1), (1, 2, 2, 1)]


def megatrons(
    context: ForkServerContext, job: Job, result: Path
) -> dict[tuple[int, str], dict[str, str]]:
    """By evaluation the mean of its losses, in the order of all microbatches."""
    run_processes(context, job, "megatron_side", "prepare_data", [([job],)])
    ranks = [(job, rank, result) for rank in range(job.num_workers)]
    run_processes(context, job, "evaluated_ranks", "train_and_evaluate", ranks)
    values: dict[tuple[int, str], dict[str, float]] = {}
    for tensors in load_stages(result).values():
        for name, loss in tensors.items():
            step, kind, place = name.split("/", 2)
            values.setdefault((int(step), kind), {})[place] = float(loss)
    return {key: {"lm loss": mean(losses).hex()} for key, losses in values.items()}


def mean(losses: dict[str, float]) -> float:
    """Added one after the other: sum() adds otherwise from Python 3.12 on."""
    return reduce(add, (losses[place] for place in sorted(losses))) / len(losses)


@pytest.mark.multiprocess
@pytest.mark.timeout(240)
@pytest.mark.parametrize(
    ("stages", "pipelines", "microbatches", "chunks"), several_in_ci(SHAPES, *SHAPES[:2])
)
def test_losses_are_those_of_megatrons_own_evaluation(
    context: ForkServerContext,
    tmp_path: Path,
    data_flags: tuple[str, ...],
    stages: int,
    pipelines: int,
    microbatches: int,
    chunks: int,
) -> None:
    job = Job(stages, pipelines, microbatches, str(tmp_path), data_flags, FLAGS, num_chunks=chunks)
    expected = megatrons(context, job, tmp_path / "megatron")
    assert len(expected) == 4
    run_processes(context, job, "product_side", "train_job", [(job, tmp_path / "product")])
    assert open_run(job.job_dir).evaluations == expected
