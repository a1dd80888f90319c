"""What a training script brings: its model, its data, its forward step."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn

ModelProvider = Callable[..., nn.Module]
"""Megatron's: ``(pre_process, post_process, vp_stage=None, ...)`` to one chunk of the model."""

DatasetsProvider = Callable[..., Any]
"""Megatron's: the numbers of training, validation and test samples to three datasets."""

ForwardStepFunc = Callable[..., Any]
"""Megatron's: data iterator and chunk to the output and the loss function."""


@dataclass(frozen=True, slots=True)
class Script:
    """One training script, written as for Megatron-LM."""

    datasets: DatasetsProvider
    model: ModelProvider
    forward_step: ForwardStepFunc
