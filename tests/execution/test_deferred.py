"""Whatever the order in which backwards run, gradients are summed in ascending order."""

from itertools import permutations
from typing import Any

import pytest
import torch

from megatron_bamboo.execution.deferred import DeferredSums
from megatron_bamboo.schedule.actions import Action, Op

MICROBATCHES = 4


class OneStage:
    """Two units in each of two chunks."""

    def __init__(self) -> None:
        self._gradients = {chunk: (torch.zeros(7), torch.zeros(3)) for chunk in range(2)}

    def gradients(self, chunk: int) -> tuple[torch.Tensor, ...]:
        return self._gradients[chunk]


def made_by(microbatch: int, size: int) -> torch.Tensor:
    """Sums of these depend on their order."""
    generator = torch.Generator().manual_seed(microbatch)
    scale = 10.0 ** (3 * (microbatch % 3))
    return scale * torch.randn(size, generator=generator)


def run(order: tuple[int, ...], first: int = 0) -> tuple[torch.Tensor, ...]:
    """The sums of a chunk after backwards in this order."""
    stage: Any = OneStage()
    sums = DeferredSums({1: stage})
    for microbatch in range(first):
        for gradient in stage.gradients(0):
            gradient.add_(made_by(microbatch, len(gradient)))
    if first:
        sums.go_on_after(1, 0, first - 1)
    for microbatch in order:
        with sums.backward(Action(1, 0, Op.B, microbatch)):
            for gradient in stage.gradients(0):
                gradient.add_(made_by(microbatch, len(gradient)))
    return stage.gradients(0)


IN_ORDER = run(tuple(range(MICROBATCHES)))


@pytest.mark.parametrize("order", [*permutations(range(MICROBATCHES))], ids=str)
def test_every_order_gives_the_same_bits(order: tuple[int, ...]) -> None:
    assert all(map(torch.equal, run(order), IN_ORDER))


def test_the_orders_would_differ_otherwise() -> None:
    backwards = sum(made_by(m, 7) for m in reversed(range(MICROBATCHES)))
    assert not torch.equal(torch.as_tensor(backwards), IN_ORDER[0])


@pytest.mark.parametrize("order", [(2, 3), (3, 2)])
def test_a_sum_goes_on_from_a_mirror(order: tuple[int, ...]) -> None:
    assert all(map(torch.equal, run(order, first=2), IN_ORDER))


def test_chunks_and_steps_are_apart() -> None:
    stage: Any = OneStage()
    sums = DeferredSums({1: stage})
    with sums.backward(Action(1, 0, Op.B, 1)):
        stage.gradients(0)[0].add_(1.0)
    with sums.backward(Action(1, 1, Op.B, 0)):
        stage.gradients(1)[0].add_(2.0)
    assert (stage.gradients(0)[0][0], stage.gradients(1)[0][0]) == (0.0, 2.0)
    sums.start_step()
    with sums.backward(Action(1, 0, Op.B, 0)):
        stage.gradients(0)[0].add_(3.0)
    assert stage.gradients(0)[0][0] == 3.0
