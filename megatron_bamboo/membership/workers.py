"""Names of workers: a node holds as many as share its layers, one a tensor rank.

Plans, losses and people speak of nodes, since a node lives and dies as one. Process groups and
records need every worker, so a worker's name says which node it lives and dies with.
"""

from collections.abc import Iterable

_MARK = ":"


def worker_name(node: str, tensor_rank: int, tensor_size: int) -> str:
    """The worker of one tensor rank; alone on its node it has the node's name."""
    assert 0 <= tensor_rank < tensor_size, (tensor_rank, tensor_size)
    return node if tensor_size == 1 else f"{node}{_MARK}{tensor_rank}"


def workers_of(nodes: Iterable[str], tensor_size: int) -> tuple[str, ...]:
    """All workers of some nodes, node by node in tensor rank order."""
    return tuple(worker_name(node, t, tensor_size) for node in nodes for t in range(tensor_size))


def node_of(worker: str) -> str:
    """The node that a worker lives and dies with."""
    return worker.partition(_MARK)[0]
