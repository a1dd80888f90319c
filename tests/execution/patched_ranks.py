"""What a rank of Megatron does in the tests of ``patch()``, in a process of its own."""

import os
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron_rank import MegatronRank
from trained_stages import Job
from user_script import forward_step

from megatron_bamboo import patch


def evaluate(job: Job, rank: int) -> None:
    """Forward passes alone: the losses of a whole step, and no gradient."""
    with patch():
        trained = _rank(job, rank)
        training = trained.forward_backward(1)
        for _name, parameter in trained.named_parameters():
            parameter.main_grad.zero_()
        evaluated = _call(trained, job, forward_only=True)
        for _name, parameter in trained.named_parameters():
            assert not parameter.main_grad.any()
    assert len(evaluated) == len(training) == (job.num_microbatches if rank == 1 else 0)
    for one, other in zip(training, evaluated, strict=True):
        assert torch.equal(one["lm loss"], other["lm loss"])
    dist.barrier()


def train_half_freed(job: Job, rank: int) -> None:
    """With outputs freed once they are sent the gradients are the same."""
    gradients = []
    for frees in (False, True):
        with patch():
            trained = _rank(job, rank)
            for chunk in trained.model:
                chunk.config.deallocate_pipeline_outputs = frees
            trained.forward_backward(1)
        gradients.append([p.main_grad.clone() for _name, p in trained.named_parameters()])
        dist.barrier()
    for one, other in zip(*gradients, strict=True):
        assert torch.equal(one, other) and one.any()


def patch_again(job: Job, rank: int) -> None:
    """A second patch in the same ranks finds the neighbours, also those that come later."""
    for number in range(3):
        if rank == number % 2:
            time.sleep(0.5)
        with patch(timedelta(seconds=20)):
            _rank(job, rank).forward_backward(1)
    dist.barrier()


def lose_a_neighbour(job: Job, rank: int) -> None:
    """A wait for a stage that is gone ends at once, and says for whom it was."""
    with patch(timedelta(seconds=30)):
        trained = _rank(job, rank)
        trained.forward_backward(1)
        dist.barrier()
        if rank == 1:
            os._exit(0)  # no group is closed in good order
        with pytest.raises(ConnectionError, match="stage 1"):
            trained.forward_backward(2)
    os._exit(0)


def refuse(job: Job, rank: int) -> None:
    """What this schedule does not do is refused before any work."""
    with patch():
        trained = _rank(job, rank)
        trained.model[0].config.variable_seq_lengths = True
        with pytest.raises(ValueError, match="variable_seq_lengths"):
            trained.forward_backward(1)
        trained.model[0].config.variable_seq_lengths = False
        with pytest.raises(ValueError, match="tensors of one shape"):
            _call(trained, job, decoder_seq_length=7)
    dist.barrier()


def _rank(job: Job, rank: int) -> MegatronRank:
    return MegatronRank(*job.options(), rank, job.rendezvous, is_patched=True)


def _call(trained: MegatronRank, job: Job, **more: Any) -> Sequence[Any]:
    options, _layout = job.options()
    reports: Sequence[Any] = trained._forward_backward(
        forward_step_func=forward_step,
        data_iterator=[trained._microbatches(1) for _ in trained.model],
        model=trained.model,
        num_microbatches=job.num_microbatches,
        seq_length=options.data.seq_length,
        micro_batch_size=options.training.micro_batch_size,
        **more,
    )
    return reports
