"""What a forward saves for its backward, kept in host memory until that backward.

A redundant forward's backward runs only after a loss, so what it saves need not take the device's
memory. A storage is copied once, whole, and given back with the same sizes, strides and offsets, so
that the backward runs the same kernels and computes the same bits. With CUDA the copies go to
pinned memory on a stream of their own. Elsewhere they are copies all the same: what was saved on
the device is let go of.
"""

import contextlib
import weakref
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# A storage, in the state in which it was saved: what is written into it later has another version.
_Key = tuple[StorageWeakRef, int]


@dataclass(slots=True, weakref_slot=True, eq=False)
class _HostCopy:
    """All bytes of a storage."""

    data: Tensor
    written: torch.cuda.Event | None


@dataclass(frozen=True, slots=True)
class _Saved:
    """A tensor in a copied storage."""

    copy: _HostCopy
    dtype: torch.dtype
    device: torch.device
    offset: int
    size: torch.Size
    stride: tuple[int, ...]

    def restored(self) -> Tensor:
        """The tensor on its device."""
        if self.copy.written is not None:
            self.copy.written.synchronize()
        storage = self.copy.data.to(self.device).untyped_storage()
        empty = torch.empty(0, dtype=self.dtype, device=self.device)
        return empty.set_(storage, self.offset, self.size, self.stride)  # type: ignore[call-overload,no-any-return]


class HostMemory:
    """Where the redundant forwards of one worker leave what they save."""

    def __init__(self) -> None:
        self._copies: weakref.WeakSet[_HostCopy] = weakref.WeakSet()
        self._stream = torch.cuda.Stream() if torch.cuda.is_available() else None

    @property
    def held_bytes(self) -> int:
        """What is kept here now."""
        return sum(copy.data.nbytes for copy in self._copies)

    @contextlib.contextmanager
    def saving(self, kept: Iterable[Tensor]) -> Iterator[None]:
        """Within, what autograd saves comes here.

        Args:
            kept: what stays where it is in any case, like parameters.
        """
        staying = {StorageWeakRef(tensor.untyped_storage()) for tensor in kept}
        # Weak references: a storage's address is not used again as long as there is one.
        copies: dict[_Key, _HostCopy] = {}

        def pack(tensor: Tensor) -> Tensor | _Saved:
            storage = StorageWeakRef(tensor.untyped_storage())
            if storage in staying:
                return tensor
            key = (storage, tensor._version)
            if key not in copies:
                copies[key] = self._copy(tensor)
            return _Saved(
                copies[key],
                tensor.dtype,
                tensor.device,
                tensor.storage_offset(),
                tensor.size(),
                tensor.stride(),
            )

        def unpack(saved: Tensor | _Saved) -> Tensor:
            return saved.restored() if isinstance(saved, _Saved) else saved

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _copy(self, tensor: Tensor) -> _HostCopy:
        storage = tensor.untyped_storage()
        there = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(storage)
        if self._stream is None:
            copy = _HostCopy(there.clone(), None)
        else:
            copy = self._copy_aside(there, self._stream)
        self._copies.add(copy)
        return copy

    def _copy_aside(self, there: Tensor, stream: torch.cuda.Stream) -> _HostCopy:
        """Copy without holding up what the device computes."""
        here = torch.empty(there.numel(), dtype=torch.uint8, pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            here.copy_(there, non_blocking=True)
            written = stream.record_event()
        there.record_stream(stream)
        return _HostCopy(here, written)
