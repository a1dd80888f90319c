"""Megatron-core's own training with its own evaluations, for the tests of ours."""

from pathlib import Path

import torch.distributed as dist
from megatron_rank import MegatronRank
from trained_stages import Job, StageTensors, save_stage


def train_and_evaluate(job: Job, rank: int, result: Path) -> None:
    """Be one rank; leave each microbatch's loss of each evaluation as
    ``<step>/<kind>/<batch>/<global microbatch>``."""
    options, layout = job.options()
    trained = MegatronRank(options, layout, rank, job.rendezvous)
    tensors: StageTensors = {}
    for step in range(1, job.num_steps + 1):
        trained.forward_backward(step)
        trained.apply()
        due = options.evaluations.after_step(step)
        if step == job.num_steps:
            due += options.evaluations.after_training(trained.has_test)
        for evaluation in due:
            for batch in range(evaluation.num_batches):
                for microbatch, report in enumerate(trained.evaluate(evaluation, batch)):
                    number = job.global_microbatch(microbatch, trained.pipeline)
                    tensors[f"{evaluation.key}/{batch}/{number:03}"] = report["lm loss"].clone()
    save_stage(result, trained.pipeline, trained.stage, tensors)
    dist.barrier()
