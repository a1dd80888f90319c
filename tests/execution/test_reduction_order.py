"""In which order a reduction does what it does with others of its node, and with other nodes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatron_bamboo.execution.errors import PeerLost
from megatron_bamboo.execution.step_state import StepState
from megatron_bamboo.execution.tail import Tail
from megatron_bamboo.planner.arrangement import equal_pipelines

ARRANGEMENT = equal_pipelines(2, 2, 1, layers_per_chunk=2)


class Log:
    """A stage, its groups and the registry of them; says what is done."""

    tied_unit = None

    def __init__(self, lost_in: int) -> None:
        names = ("embedding", "layer0", "layer1")
        self.done: list[str] = []
        self.units = {name: self._unit(name) for name in names}
        self._lost_in = lost_in

    def _unit(self, name: str) -> Any:
        return SimpleNamespace(name=name, gradient=torch.ones(2), reduced=torch.zeros(2))

    def sum_sequence_parallel(self, unit: Any) -> None:
        self.done.append(f"sum {unit.name}")

    def is_current(self, _name: str, group: object) -> bool:
        return group is self

    def get(self, _name: str) -> "Log":
        return self

    def all_reduce(self, tensor: torch.Tensor) -> None:
        number = sum(text == "reduce" for text in self.done)
        if number == self._lost_in:
            raise PeerLost(("node2",), "all_reduce", None)
        self.done.append("reduce")
        tensor.mul_(3)


def tail(log: Log) -> Tail:
    unused: Any = None
    return Tail(
        "node0", {0: log}, unused, log, *[unused] * 8,  # type: ignore[dict-item, arg-type]
    )  # fmt: skip


@pytest.mark.parametrize("lost_in", [0, 1, 2])
def test_a_loss_leaves_no_other_worker_of_the_node_in_a_sum_of_theirs(lost_in: int) -> None:
    log, state = Log(lost_in), StepState(1)
    with pytest.raises(PeerLost):
        tail(log).reduce(0, ARRANGEMENT, state)
    assert log.done == ["sum embedding", "sum layer0", "sum layer1", *["reduce"] * lost_in]


def test_what_is_reduced_in_the_group_that_there_is_is_not_reduced_again() -> None:
    log, state = Log(lost_in=99), StepState(1)
    tail(log).reduce(0, ARRANGEMENT, state)
    done = list(log.done)
    tail(log).reduce(0, ARRANGEMENT, state)
    assert log.done == done
    assert all(torch.equal(unit.reduced, torch.full((2,), 3.0)) for unit in log.units.values())
