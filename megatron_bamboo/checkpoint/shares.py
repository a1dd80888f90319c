"""One worker's share of the optimizer's state, as parts of the whole tensors of a checkpoint.

Where the pipelines share the optimizer's state each writes what it has. Some elements in a row of a
tensor are no box of it, as a checkpoint's parts are, but a few boxes: the rest of a row, whole
rows, the beginning of another. So a checkpoint is the same as if one worker had written all.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from torch import Tensor

from megatron_bamboo.model.shard import Piece


@dataclass(frozen=True, slots=True)
class Box:
    """Some of a tensor's elements: along each axis those from ``offset`` on."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]


def boxes_of(shape: tuple[int, ...], elements: range) -> Iterator[Box]:
    """Elements of a flattened tensor as boxes, in their order."""
    if not elements:
        return
    if len(shape) <= 1:
        offset = (elements.start,) * len(shape)
        yield Box(offset, (len(elements),) * len(shape))
        return
    row = math.prod(shape[1:])
    first, end = -(-elements.start // row), elements.stop // row
    if first > end:  # all within one row
        first = end = elements.start // row
        yield from _in_row(shape, first, elements)
        return
    yield from _in_row(shape, first - 1, range(elements.start, first * row))
    if first < end:
        yield Box((first,) + (0,) * (len(shape) - 1), (end - first, *shape[1:]))
    yield from _in_row(shape, end, range(end * row, elements.stop))


def _in_row(shape: tuple[int, ...], number: int, elements: range) -> Iterator[Box]:
    start = number * math.prod(shape[1:])
    inner = range(elements.start - start, elements.stop - start)
    for box in boxes_of(shape[1:], inner):
        yield Box((number, *box.offset), (1, *box.shape))


def sharded_piece(
    parameter: ShardedTensor | ShardedTensorFactory, piece: Piece, kept: Mapping[str, Tensor]
) -> Iterator[ShardedTensor]:
    """What the optimizer keeps of one piece, as parts of whole tensors.

    Args:
        parameter: how Megatron-core saves the piece's parameter, perhaps as several tensors.
        kept: by prefix of the tensors' names, of the piece's size.
    """
    for part in _tensors_of(parameter):
        place = _place_in(piece.parameter, part.data)
        own = range(piece.start, piece.start + piece.part.numel())
        both = range(max(own.start, place.start), min(own.stop, place.stop))
        inner = range(both.start - place.start, both.stop - place.start)
        taken = both.start - own.start
        for box in boxes_of(part.local_shape, inner):
            end = taken + math.prod(box.shape)
            for prefix, value in kept.items():
                yield _as_part(part, prefix, value.view(-1)[taken:end], box)
            taken = end


def _tensors_of(parameter: ShardedTensor | ShardedTensorFactory) -> list[ShardedTensor]:
    if isinstance(parameter, ShardedTensor):
        return [parameter]
    built: Any = parameter.build()
    return list(nested_values(built))


def _place_in(parameter: Tensor, part: Tensor) -> range:
    """The elements of the flat parameter that a part of it is."""
    assert part.is_contiguous(), "a part of a parameter is not in one row"
    start = part.storage_offset() - parameter.storage_offset()
    assert 0 <= start <= parameter.numel() - part.numel(), "it is no part of the parameter"
    return range(start, start + part.numel())


def _as_part(part: ShardedTensor, prefix: str, data: Tensor, box: Box) -> ShardedTensor:
    """One box; no grid has it, so it names all of the whole's axes."""
    before = part.prepend_axis_num
    offset = (0,) * before + box.offset
    shape = (1,) * before + box.shape
    return replace(
        part,
        key=f"{prefix}.{part.key}",
        data=data.view(shape),
        dtype=data.dtype,
        local_shape=shape,
        global_offset=tuple(map(sum, zip(part.global_offset, offset, strict=True))),
        axis_fragmentations=None,
        prepend_axis_num=0,
    )
