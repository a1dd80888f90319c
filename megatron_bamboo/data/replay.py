"""A step's microbatches by number, behind the iterator that a forward step expects."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_map


class ReplayedIterator:
    """Serves the microbatch that was selected, as often as it is asked for.

    A takeover runs microbatches again, and a shadow runs its own and its victim's, so the place in
    the iterator cannot be the number of calls. What the source gave is kept until the step is over.
    """

    def __init__(self, source: Iterator[Any]) -> None:
        self._source = source
        self._given: list[Any] = []
        self._selected = 0
        self._is_taken = False

    def select(self, microbatch: int) -> None:
        """Choose what ``next`` gives."""
        self._selected = microbatch
        self._is_taken = False

    def __iter__(self) -> "ReplayedIterator":
        return self

    def __next__(self) -> Any:
        if self._is_taken:
            raise ValueError("a forward step can take one microbatch, and has asked for a second")
        self._is_taken = True
        while len(self._given) <= self._selected:
            self._given.append(next(self._source))
        # A copy: whoever runs the microbatch again must find what the first one found.
        return tree_map(_copied, self._given[self._selected])


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
