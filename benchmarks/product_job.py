"""A job of the product on this machine, as ``bamboo run`` runs it, with forked workers.

So whoever runs it may look into the workers: they are its own processes' children.
"""

import os
from collections.abc import Callable, Sequence
from pathlib import Path

from user_script import forward_step

from megatron_bamboo.agent.agent import forked_node, forked_worker
from megatron_bamboo.agent.environment import prepare_environment
from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.script.providers import Script
from megatron_bamboo.training import run_phase
from pretrain_gpt_bamboo import model_provider, train_valid_test_datasets_provider

DEADLINES = Deadlines(startup_seconds=60, stall_seconds=60, store_seconds=60)


def train(flags: Sequence[str]) -> int:
    """Do this process's part of the job, by its environment; the exit status."""
    script = Script(train_valid_test_datasets_provider, model_provider, forward_step)
    return run_phase(script, flags)


def run_product(
    flags: Sequence[str],
    num_nodes: int,
    job_dir: Path,
    work: Callable[[], int],
    deadlines: Deadlines = DEADLINES,
) -> Outcome:
    """Prepare and run a job.

    Args:
        job_dir: made here; everything the job leaves is in it.
        work: what a worker does; in the end it calls ``train`` with the same flags.
    """
    shape = prepare_product(flags, num_nodes, job_dir)
    nodes = tuple(f"node{number}" for number in range(num_nodes))
    spec = JobSpec(nodes, shape, job_dir, deadlines=deadlines)
    return run_job(spec, forked_node(forked_worker(work)), lambda _line: None)


def prepare_product(flags: Sequence[str], num_nodes: int, job_dir: Path) -> JobShape:
    """Make a job's folder, and let the script say there what the job is."""
    job_dir.mkdir()
    os.environ.update(prepare_environment(job_dir, num_nodes, 1))
    assert train(flags) == 0
    return JobShape.read(job_dir)
