"""A link that carries only so many bytes a second, for trainings with emulated layers.

On one machine messages are as good as there at once. Here each node has one link for all that it
receives: a message is there when its bytes would have passed it, one message after the other.
"""

import threading
import time

import torch.distributed as dist
from torch import Tensor

from megatron_bamboo.execution.groups import Group


class Link:
    """What a node receives by; all of its channels share it."""

    def __init__(self, bytes_per_second: float) -> None:
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def carry(self, num_bytes: int) -> None:
        """Return when so many bytes more have passed."""
        with self._lock:
            begin = max(self._free_at, time.monotonic())
            self._free_at = until = begin + num_bytes / self._bytes_per_second
        time.sleep(max(0.0, until - time.monotonic()))


class ShapedGroup:
    """A group whose messages come by a link."""

    def __init__(self, group: Group, link: Link) -> None:
        self.name = group.name
        self.members = group.members
        self.has_tags = group.has_tags
        self._group = group
        self._link = link

    def all_reduce(self, tensor: Tensor) -> None:
        self._group.all_reduce(tensor)

    def send(self, tensor: Tensor, peer: str, tag: int) -> dist.Work:
        return self._group.send(tensor, peer, tag)

    def receive(self, tensor: Tensor, peer: str, tag: int) -> None:
        self._group.receive(tensor, peer, tag)
        self._link.carry(tensor.nbytes)

    def release(self) -> None:
        self._group.release()
