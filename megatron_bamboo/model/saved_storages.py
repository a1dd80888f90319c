"""Which memory autograd keeps for backwards that have not run yet.

Nothing else tells: what a graph has saved is not to be found among a process's objects.
"""

import contextlib
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef


class SavedStorages:
    """The storages that forwards have saved, each once and as long as it lives."""

    def __init__(self) -> None:
        self._sizes: dict[StorageWeakRef, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Within, what is saved counts; it stays where it is."""

        def pack(tensor: Tensor) -> Tensor:
            storage = tensor.untyped_storage()
            self._sizes[StorageWeakRef(storage)] = storage.nbytes()
            # Without its place in the graph, which would keep itself alive through it.
            return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            yield

    def num_bytes(self, without: Iterable[Tensor]) -> int:
        """What lives of it, but for the memory of these tensors."""
        others = {StorageWeakRef(tensor.untyped_storage()) for tensor in without}
        self._sizes = {ref: size for ref, size in self._sizes.items() if not ref.expired()}
        return sum(size for ref, size in self._sizes.items() if ref not in others)
