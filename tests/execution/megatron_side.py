"""The same training by Megatron-core alone; what it computes on the way is left for the tests."""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from itertools import cycle
from pathlib import Path
from typing import Any

import torch.distributed as dist
from megatron.core.pipeline_parallel.schedules import forward_backward_pipelining_with_interleaving
from megatron_rank import MegatronRank, build_indices
from torch import Tensor, nn
from trained_stages import Job, Run, StageTensors, save_stage
from user_script import forward_step

from megatron_bamboo import patch


def train_rank(runs: Sequence[Run], rank: int) -> None:
    """Be one rank of all runs: starting one takes longer than its training.

    They have the same numbers of stages, chunks and pipelines.
    """
    for run in runs:
        _train(run, rank)


def prepare_data(jobs: Sequence[Job]) -> None:
    """Build the indices of the jobs' data, which the product's prepare phase may have built."""
    for job in jobs:
        build_indices(*job.options())


def note_refusals(job: Job, rank: int, shapes: Sequence[tuple[int, int]], noted: Path) -> None:
    """Write down what Megatron's interleaved schedule raises for each shape, all to be refused.

    Args:
        shapes: numbers of microbatches, and how many of them go through a chunk in a row.
    """
    options, layout = job.options()
    model = MegatronRank(options, layout, rank, job.rendezvous).model
    errors = []
    for num_microbatches, group_size in shapes:
        for chunk in model:
            chunk.config.microbatch_group_size_per_vp_stage = group_size
        try:
            forward_backward_pipelining_with_interleaving(
                forward_step_func=forward_step,
                data_iterator=[iter(()) for _ in model],
                model=model,
                num_microbatches=num_microbatches,
                seq_length=options.data.seq_length,
                micro_batch_size=options.training.micro_batch_size,
            )
        except (ValueError, RuntimeError) as error:
            errors.append(f"{type(error).__name__}: {error}")
    noted.with_suffix(f".{rank}").write_text(json.dumps(errors))
    dist.barrier()


def _train(run: Run, rank: int) -> None:
    with patch() if run.is_patched else nullcontext():
        _train_with_schedule(run, rank)


def _train_with_schedule(run: Run, rank: int) -> None:
    job, (options, layout) = run.job, run.job.options()
    trained = MegatronRank(
        options, layout, rank, job.rendezvous, run.group_size, is_patched=run.is_patched
    )
    step_func = _weighted(run.weights) if run.weights else forward_step
    tensors: StageTensors = {}
    for step in range(1, job.num_steps + 1):
        for microbatch, report in enumerate(trained.forward_backward(step, step_func)):
            number = job.global_microbatch(microbatch, trained.pipeline)
            tensors[f"loss/{step}/{number}"] = report["lm loss"].clone()
        gradients = {
            f"gradient/{step}/{name}": parameter.main_grad.clone()
            for name, parameter in trained.named_parameters()
        }
        if trained.apply():  # else they overflowed
            tensors |= gradients
    tensors |= {f"state/{name}": tensor for name, tensor in trained.state()}
    save_stage(run.result, trained.pipeline, trained.stage, tensors)
    dist.barrier()


def _weighted(weights: Sequence[float]) -> Callable[..., Any]:
    """The forward step of an uncut model, with the loss of each microbatch multiplied."""
    coming = cycle(weights)

    def weighted_step(data: Iterator[dict[str, Tensor]], model: nn.Module) -> tuple[Tensor, Any]:
        output, loss_func = forward_step(data, model)
        weight = next(coming)

        def weighted_loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            loss, report = loss_func(output)
            return loss * weight, report

        return output, weighted_loss

    return weighted_step
