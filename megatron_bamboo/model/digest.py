"""Digests of a stage's state, by unit: equal where all bits are equal, and made on its device.

Words of 64 bits are summed, each times an odd number of its own, modulo 2**64. So a flipped bit
changes the digest for certain, what lies at another place too but for chances of 1 in 2**52, and
no order of summing matters. It guards against broken memory, not against anyone's intent.
"""

from collections import Counter

import torch
from torch import Tensor

from megatron_bamboo.model.optimizer_state import make_moments
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.planner.trust import Kind

DIGEST_BITS = 52
"""A float64 holds such a number exactly."""

_WORD_BYTES = 8
_WORDS_AT_ONCE = 1 << 18
_FACTOR = 0x1E3779B97F4A7C15
_MODULUS = 1 << 64


def state_digests(stage: Stage) -> dict[tuple[str, Kind], int]:
    """By unit and kind the digest of what this worker holds of it; never 0."""
    make_moments(stage)
    sums: dict[tuple[str, Kind], int] = {}
    numbers: Counter[tuple[str, Kind]] = Counter()
    for name, tensor in stage.state():
        unit = name.partition("/")[0]
        kind = Kind.PARAMETERS if name.endswith("/parameter") else Kind.OPTIMIZER
        # A number of its own keeps tensors apart; what else a worker has of others may differ.
        value = (2 * numbers[unit, kind] + 1) * weighted_sum(tensor)
        numbers[unit, kind] += 1
        sums[unit, kind] = (sums.get((unit, kind), 0) + value) % _MODULUS
    return {key: value % ((1 << DIGEST_BITS) - 1) + 1 for key, value in sums.items()}


def weighted_sum(tensor: Tensor) -> int:
    """The sum of a tensor's words, each times an odd number, modulo 2**64."""
    words = _words(tensor)
    total = 0
    for start in range(0, len(words), _WORDS_AT_ONCE):
        part = words[start : start + _WORDS_AT_ONCE]
        places = torch.arange(start, start + len(part), device=part.device) * _FACTOR
        total += int(((places ^ (places >> 29)) | 1).mul_(part).sum())
    return total % _MODULUS


def _words(tensor: Tensor) -> Tensor:
    """A tensor's bytes as 64-bit words, with zeros after the last."""
    flat = tensor.detach().reshape(-1).view(torch.uint8)
    missing = -len(flat) % _WORD_BYTES
    offset = flat.storage_offset() % _WORD_BYTES
    if missing or offset:
        flat = torch.cat([flat, flat.new_zeros(missing)])
    return flat.view(torch.int64)
