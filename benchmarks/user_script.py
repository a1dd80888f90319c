"""The forward step that both sides of the parity test run, written as Megatron's users write it."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.utils import get_attr_wrapped_model
from torch import Tensor


def forward_step(
    data_iterator: Iterator[dict[str, Tensor]], model: torch.nn.Module
) -> tuple[Tensor, partial[Any]]:
    """One microbatch through this chunk; it asks Megatron's global state where it is."""
    chunk = get_attr_wrapped_model(model, "vp_stage")
    is_first = parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=chunk)
    is_last = parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=chunk)
    batch = next(data_iterator) if is_first or is_last else {}
    output = model(
        batch.get("tokens"),
        batch.get("position_ids"),
        attention_mask=None,
        labels=batch.get("labels") if is_last else None,
    )
    return output, partial(_loss, batch.get("loss_mask"))


def _loss(loss_mask: Tensor, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    mask = loss_mask.view(-1)
    loss = torch.sum(output.view(-1) * mask) / mask.sum()
    return loss, {"lm loss": loss.detach().clone()}
