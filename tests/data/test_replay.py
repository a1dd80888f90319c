"""A step's microbatches, as often as they are asked for."""

import pytest
import torch

from megatron_bamboo.data.replay import ReplayedIterator


def replayed() -> ReplayedIterator:
    return ReplayedIterator({"tokens": torch.full((2,), n), "number": n} for n in range(3))


def test_any_microbatch_comes_when_it_is_selected_and_again() -> None:
    data = replayed()
    for microbatch in (2, 0, 0, 1, 2):
        data.select(microbatch)
        assert next(data)["number"] == microbatch


def test_who_changes_a_microbatch_changes_it_for_nobody_else() -> None:
    data = replayed()
    data.select(1)
    batch = next(data)
    batch["tokens"].add_(5)
    del batch["number"]
    data.select(1)
    again = next(data)
    assert again["number"] == 1 and torch.equal(again["tokens"], torch.ones(2, dtype=torch.long))


def test_a_second_one_in_the_same_forward_step_is_an_error() -> None:
    data = replayed()
    data.select(0)
    next(data)
    with pytest.raises(ValueError, match="has asked for a second"):
        next(data)
