"""Megatron's helpers for a script's ``get_batch`` and dataset provider."""

import argparse
from collections.abc import Iterator

import torch
from megatron.core import parallel_state
from torch import Tensor

Batch = dict[str, Tensor | None]

_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def get_batch_on_this_tp_rank(data_iterator: Iterator[Batch]) -> Batch:
    """The next microbatch on this worker's device.

    Megatron reads it on the first tensor rank and broadcasts it; here every worker reads its own
    data, so that no worker waits for another in the middle of a forward pass.
    """
    batch, device = next(data_iterator), torch.cuda.current_device()
    found = {key: batch.get(key) for key in _KEYS}
    return {key: None if tensor is None else tensor.to(device) for key, tensor in found.items()}


def get_batch_on_this_cp_rank(batch: Batch) -> Batch:
    """The batch as it is: there is no context parallelism."""
    return batch


Blend = tuple[list[str], None]


def get_blend_and_blend_per_split(
    args: argparse.Namespace,
) -> tuple[Blend | None, list[Blend | None] | None]:
    """What ``GPTDatasetConfig`` wants to know of ``--data-path``, or of each part's own."""
    if args.data_path is not None:
        return (args.data_path, None), None
    paths = (args.train_data_path, args.valid_data_path, args.test_data_path)
    return None, [None if path is None else (path, None) for path in paths]


def is_first_or_last_pipeline_stage(vp_stage: int | None) -> bool:
    """Whether the chunk under way is at one of the model's ends."""
    return parallel_state.is_pipeline_first_stage(
        ignore_virtual=False, vp_stage=vp_stage
    ) or parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)
