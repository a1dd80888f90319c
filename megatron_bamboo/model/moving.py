"""All state of a stage, or of a unit, as one flat tensor of bytes, to be sent to another holder.

Its length follows from the model alone, so a receiver knows what to expect. A checksum over the
bytes is a part of it: what crosses a network and is kept for ever is not taken on trust.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bamboo.model.optimizer_state import make_moments
from megatron_bamboo.model.stage import Stage

_DIGEST_BYTES = 16
_MOST_SCALES = 3
_COUNTERS = 2 + _MOST_SCALES  # samples, how many numbers of the loss scale follow, these


@dataclass(frozen=True, slots=True)
class Counters:
    """What goes with a stage's state and belongs to no parameter."""

    num_samples: int
    """That the learning rate's course has seen."""
    loss_scale: Tensor


NO_COUNTERS = Counters(0, torch.zeros(0, dtype=torch.float64))
"""For state that goes to one who has counted all along."""


def num_bytes(stage: Stage, unit: str | None = None) -> int:
    """The length of a packed stage, or of one unit of it."""
    make_moments(stage)
    return _DIGEST_BYTES + 8 * _COUNTERS + sum(t.nbytes for t in _tensors(stage, unit))


def pack(stage: Stage, counters: Counters, unit: str | None = None) -> Tensor:
    """A copy of a stage's state, or of one unit's, one tensor of bytes on its device."""
    make_moments(stage)
    scales = counters.loss_scale.tolist()
    assert len(scales) <= _MOST_SCALES
    numbers = [counters.num_samples, len(scales), *scales, *[0] * (_MOST_SCALES - len(scales))]
    head = torch.tensor(numbers, dtype=torch.float64)
    tensors = list(_tensors(stage, unit))
    body = torch.cat([_bytes_of(t.to(tensors[0].device)) for t in (head, *tensors)])
    return torch.cat([_digest(body), body])


def unpack(stage: Stage, packed: Tensor, unit: str | None = None) -> Counters:
    """Put packed state in place of a stage's own, or of one unit's; what went with it.

    Raises:
        ValueError: the bytes are not those that were packed.
    """
    make_moments(stage)
    digest, body = packed[:_DIGEST_BYTES], packed[_DIGEST_BYTES:]
    if not torch.equal(_digest(body), digest):
        raise ValueError(f"the state of stage {stage.number} came with another checksum")
    tensors = list(_tensors(stage, unit))
    head, *parts = body.split([8 * _COUNTERS, *(tensor.nbytes for tensor in tensors)])
    with torch.no_grad():
        for tensor, part in zip(tensors, parts, strict=True):
            _bytes_of(tensor).copy_(part)
    samples, length, *scales = head.cpu().clone().view(torch.float64).tolist()
    scale = torch.tensor(scales[: int(length)], dtype=torch.float64)
    return Counters(int(samples), scale)


def copy_unit(source: Stage, target: Stage, unit: str) -> None:
    """Put a unit's state in place of another stage's own, within this worker's memory."""
    make_moments(source)
    make_moments(target)
    with torch.no_grad():
        for to, given in zip(_tensors(target, unit), _tensors(source, unit), strict=True):
            to.copy_(given)


def _tensors(stage: Stage, unit: str | None) -> Iterator[Tensor]:
    state = stage.state() if unit is None else stage.state_of(unit)
    return (tensor for _name, tensor in state)


def _bytes_of(tensor: Tensor) -> Tensor:
    """The bytes of a tensor, which are its own where it is in one piece, as state is."""
    return tensor.detach().reshape(-1).view(torch.uint8)


def _digest(body: Tensor) -> Tensor:
    digest = hashlib.blake2b(body.cpu().numpy(), digest_size=_DIGEST_BYTES).digest()
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(body.device)
