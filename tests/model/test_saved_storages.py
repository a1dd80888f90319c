"""What autograd keeps is counted once, as long as it lives, and kept no longer than without."""

import torch

from megatron_bamboo.model.saved_storages import SavedStorages


def test_each_storage_counts_once_and_until_its_backward() -> None:
    saved, weight = SavedStorages(), torch.ones(10, requires_grad=True)
    with saved.recording():
        middle = weight.exp()  # saves its output
        end = (middle * middle).sum()  # saves it again
    assert saved.num_bytes(without=[weight]) == 40
    assert saved.num_bytes(without=[weight, middle]) == 0
    del middle
    end.backward()
    assert saved.num_bytes(without=[]) == 0


def test_a_graph_that_is_let_go_of_lets_go_of_all() -> None:
    saved = SavedStorages()
    with saved.recording():
        output = torch.ones(10, requires_grad=True).exp().sin()
    assert saved.num_bytes(without=[]) > 0
    del output
    assert saved.num_bytes(without=[]) == 0
