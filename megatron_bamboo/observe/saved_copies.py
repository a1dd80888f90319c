"""The copies of each tensor that a run has saved, whole ones and parts.

Where the pipelines share the optimizer's state no worker has all of a moment: ``unit/name/kind@17``
holds its elements from the 17th on, in the order of the whole tensor, which has the shape of
``unit/name/parameter``.
"""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_bamboo.errors import UserError
from megatron_bamboo.observe.saved_run import SavedRun, StateFile

_PART = re.compile(r"(.+)@([0-9]+)")


@dataclass(frozen=True, slots=True)
class Copy:
    """What one file holds of a tensor: all of it, or elements from ``start`` on."""

    file: StateFile
    stored: str
    start: int | None

    @property
    def tensor(self) -> Tensor:
        """Read it."""
        return self.file.tensor(self.stored)

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of the whole tensor; fewer if it does not reach so far."""
        if self.start is None:
            return whole
        return whole.reshape(-1)[self.start : self.start + self.tensor.numel()]


def copies_of(run: SavedRun) -> dict[str, list[Copy]]:
    """By tensor its copies; whole ones come first, parts in the order of their elements."""
    copies: dict[str, list[Copy]] = {}
    for file in run.files:
        for stored in file.names:
            part = _PART.fullmatch(stored)
            name, start = (part[1], int(part[2])) if part else (stored, None)
            copies.setdefault(name, []).append(Copy(file, stored, start))
    for several in copies.values():
        several.sort(key=lambda copy: (-1 if copy.start is None else copy.start, copy.file.name))
    return dict(sorted(copies.items()))


def whole_tensor(run: SavedRun, name: str, copies: dict[str, list[Copy]]) -> tuple[str, Tensor]:
    """A tensor by its first copy, or put together from parts; and where that is from.

    Raises:
        UserError: the parts are not those of a whole.
    """
    first = copies[name][0]
    if first.start is None:
        return f"{run.folder}: {first.file.name}", first.tensor
    shape = _shape_of(run, name, copies)
    return f"{run.folder}: parts", _join(run, name, copies[name], math.prod(shape)).view(shape)


def _shape_of(run: SavedRun, name: str, copies: dict[str, list[Copy]]) -> torch.Size:
    whole = copies.get(name.rpartition("/")[0] + "/parameter", [])
    if not whole or whole[0].start is not None:
        raise UserError(f"{run.folder} is not whole: it has parts of {name}, not the parameter")
    return whole[0].tensor.shape


def _join(run: SavedRun, name: str, parts: Sequence[Copy], length: int) -> Tensor:
    pieces, end = [], 0
    for part in parts:
        assert part.start is not None
        tensor = part.tensor.reshape(-1)
        if part.start == end:
            pieces.append(tensor)
            end += tensor.numel()
    if end != length:
        raise UserError(f"{run.folder} is not whole: of {name} it has {end} of {length} elements")
    return torch.cat(pieces)
