"""Names of workers, and the nodes that they live and die with."""

import pytest

from megatron_bamboo.membership.workers import node_of, worker_name, workers_of


def test_a_worker_alone_on_its_node_has_the_node_s_name() -> None:
    assert worker_name("node3", 0, 1) == "node3"
    assert workers_of(["node3", "node1"], 1) == ("node3", "node1")


def test_workers_stand_node_by_node_in_tensor_rank_order() -> None:
    names = workers_of(["node3", "node1"], 2)
    assert names == ("node3:0", "node3:1", "node1:0", "node1:1")
    assert names == tuple(worker_name(n, t, 2) for n in ("node3", "node1") for t in range(2))


def test_no_nodes_have_no_workers() -> None:
    assert workers_of([], 4) == ()


@pytest.mark.parametrize("tensor_size", [1, 2, 11])
def test_a_worker_names_its_node(tensor_size: int) -> None:
    names = workers_of(["node1", "node10"], tensor_size)
    assert len(set(names)) == 2 * tensor_size
    assert [node_of(name) for name in names] == ["node1"] * tensor_size + ["node10"] * tensor_size


@pytest.mark.parametrize("tensor_rank", [-1, 2])
def test_there_is_no_worker_of_a_rank_that_is_none(tensor_rank: int) -> None:
    with pytest.raises(AssertionError):
        worker_name("node0", tensor_rank, 2)
