"""The same training by Megatron-core alone; what it computes on the way is left for the test."""

from pathlib import Path

import torch.distributed as dist
from megatron_rank import MegatronRank
from trained_stages import Job, StageTensors, save_stage


def train_rank(job: Job, rank: int, result: Path) -> None:
    """Train as one rank, and leave this rank's stage in the folder ``result``."""
    options, layout = job.options()
    trained = MegatronRank(options, layout, rank, Path(job.folder) / "rendezvous")
    tensors: StageTensors = {}
    for step in range(1, options.training.train_iters + 1):
        for microbatch, report in enumerate(trained.forward_backward(step)):
            number = job.global_microbatch(microbatch, trained.pipeline)
            tensors[f"loss/{step}/{number}"] = report["lm loss"].clone()
        for name, parameter in trained.named_parameters():
            tensors[f"gradient/{step}/{name}"] = parameter.main_grad.clone()
        trained.apply()
    tensors |= {f"state/{name}": tensor for name, tensor in trained.state()}
    save_stage(result, trained.pipeline, trained.stage, tensors)
    dist.barrier()
