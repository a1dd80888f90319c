"""What a worker's executor is made of; wired in ``worker.py``."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bamboo.execution.accounting import MemoryAccount
from megatron_bamboo.execution.compute import Compute
from megatron_bamboo.execution.handover import UnitHandover
from megatron_bamboo.execution.held_stages import Holding
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.execution.mirrors import Mirrors
from megatron_bamboo.execution.registry import GroupRegistry
from megatron_bamboo.execution.tail import Tail
from megatron_bamboo.execution.transport import TensorShape, Transport
from megatron_bamboo.execution.turnstile import Turnstile
from megatron_bamboo.execution.verification import Verification
from megatron_bamboo.execution.whereabouts import Whereabouts
from megatron_bamboo.model.moving import num_bytes
from megatron_bamboo.model.stage import Stage
from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.schedule.actions import Action


@dataclass(frozen=True, slots=True)
class Shapes:
    """What messages look like."""

    activation: TensorShape
    tied: TensorShape | None
    refresh: dict[int, TensorShape]  # by stage held
    state: Callable[[int], TensorShape]  # of a stage held: all of its state, when it moves


def shapes_of(
    stages: Mapping[int, Stage], activation: tuple[int, ...], dtype: torch.dtype
) -> Shapes:
    """What the messages of a worker look like that holds these stages.

    Args:
        activation: of one microbatch: sequence, batch, hidden.
        dtype: of activations.
    """
    device = next(iter(stages.values())).reduced.device
    tied = [stage.tied_gradient() for stage in stages.values() if stage.tied_unit]
    return Shapes(
        activation=TensorShape(activation, dtype, device),
        tied=_shape_of(tied[0]) if tied else None,
        refresh={number: _shape_of(stage.stepped_gradient()) for number, stage in stages.items()},
        state=lambda number: TensorShape((num_bytes(stages[number]),), torch.uint8, device),
    )


def _shape_of(tensor: Tensor) -> TensorShape:
    return TensorShape(tuple(tensor.shape), tensor.dtype, tensor.device)


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts, each for its own kind of effect."""

    worker: str
    tensor_size: int
    compute: Compute
    tail: Tail
    mirrors: Mirrors
    verification: Verification
    account: MemoryAccount | None  # where memory is counted
    transport: Transport
    registry: GroupRegistry
    ledger: CommitLedger
    events: EventLog
    handover: UnitHandover
    hold: Callable[[Holding, Holding | None], Shapes]  # hold exactly these stages, and a new cut's
    promote: Callable[[], None]  # train with those of the new cut
    before_action: Callable[[Action, int], None]  # fault injection
    turnstile: Turnstile | None  # where several workers share layers
    wait_seconds: float
    where: Whereabouts
