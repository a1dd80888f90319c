"""Torch's normalization in Megatron-core's layers, sequence parallelism included.

Megatron-core's ``WrappedTorchNorm`` refuses sequence parallelism, since nothing tells the
optimizer that each tensor rank saw a part of the sequence only. All it takes is the mark that
Megatron's own fused norm leaves on its parameters.
"""

from typing import Any

from megatron.core.transformer import TransformerConfig
from torch import nn


class LocalNorm:
    """Builds ``nn.LayerNorm`` or ``nn.RMSNorm``, as the configuration says."""

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: Any
    ) -> nn.Module:
        kind = nn.RMSNorm if config.normalization == "RMSNorm" else nn.LayerNorm
        norm = kind(hidden_size, eps=eps)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
