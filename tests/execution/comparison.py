"""Two runs' tensors against each other: in bits, or as a part of the largest value."""

from collections.abc import Iterator

import torch
from torch import Tensor
from trained_stages import Stages, StageTensors


def differing(theirs: Stages, ours: Stages, kind: str) -> list[str]:
    """The tensors of one kind whose bits differ, or that only one side has."""
    assert theirs.keys() == ours.keys()
    found = []
    for stage, tensors in theirs.items():
        names = {name for name in tensors.keys() | ours[stage].keys() if name.startswith(kind)}
        found += [f"{stage} {n}" for n in sorted(names) if not _same_bits(tensors, ours[stage], n)]
    return found


def of_kind(stages: Stages, kind: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors of one kind of all stages; a pipeline's own are named once for each."""
    for tensors in stages.values():
        yield from ((name, tensor) for name, tensor in tensors.items() if name.startswith(kind))


def relative_difference(one: Tensor, other: Tensor) -> float:
    """The largest difference of two elements, as a part of the largest element of ``other``."""
    assert (one.dtype, one.shape) == (other.dtype, other.shape)
    largest = float(other.abs().max())
    difference = float((one - other).abs().max())
    return difference / largest if largest else difference


def _same_bits(theirs: StageTensors, ours: StageTensors, name: str) -> bool:
    if name not in theirs or name not in ours:
        return False
    one, other = theirs[name], ours[name]
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
