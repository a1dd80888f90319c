"""Which part of a unit's parameters a worker steps, where pipelines share the optimizer's state.

The parameters of a unit lie in one flat tensor, in the order of the gradients. It is cut into as
many shards as there are pipelines, of equal length to within one element: a shard begins and ends
anywhere in a parameter. What it has of each parameter is a *piece*, to the optimizer a parameter of
its own. A shadow has the shard of its victim; so the number of shards never changes.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shard:
    """One of ``count`` equal parts."""

    number: int = 0
    count: int = 1

    def range_in(self, length: int) -> range:
        """The elements of a flat tensor that belong to it."""
        first, end = (length * number // self.count for number in (self.number, self.number + 1))
        return range(first, end)


WHOLE = Shard()


@dataclass(frozen=True, slots=True)
class Piece:
    """What one shard has of one parameter."""

    name: str
    """The parameter's, the same on every holder."""
    parameter: nn.Parameter
    part: nn.Parameter
    """What the optimizer steps: the parameter's own memory, or the parameter itself."""
    start: int
    """Where in the flat parameter it begins."""
    gradient: Tensor
    """Its part of the unit's reduced gradient."""

    @property
    def is_parameter(self) -> bool:
        """Whether the optimizer steps the very parameter, since nothing is shared out."""
        return self.part is self.parameter

    @property
    def is_whole(self) -> bool:
        """Whether it is all of its parameter."""
        return self.part.numel() == self.parameter.numel()

    def of(self, whole: Tensor) -> Tensor:
        """The same elements of another tensor of the parameter's size, in the part's shape."""
        elements = whole.view(-1)[self.start : self.start + self.part.numel()]
        return elements.view(self.part.shape)


Places = Mapping[nn.Parameter, range]
"""By parameter the elements of the unit's flat tensors that are its own."""


def whole_pieces(
    named: Iterator[tuple[str, nn.Parameter]], places: Places, reduced: Tensor
) -> tuple[Piece, ...]:
    """Each parameter as a piece, itself."""
    return tuple(
        Piece(name, parameter, parameter, 0, _cut(reduced, places[parameter]))
        for name, parameter in named
    )


def pieces_of(
    shard: Shard,
    flat: Tensor,
    named: Iterator[tuple[str, nn.Parameter]],
    places: Places,
    reduced: Tensor,
) -> tuple[Piece, ...]:
    """What a shard has of each parameter that it has anything of.

    Args:
        flat: holds the parameters.
        reduced: the reduced gradient, as long.
    """
    own, pieces = shard.range_in(flat.numel()), []
    for name, parameter in named:
        place = places[parameter]
        both = range(max(place.start, own.start), min(place.stop, own.stop))
        if both:
            # Megatron-core decides by the number of axes whether a parameter decays.
            shape = (-1, 1) if parameter.dim() > 1 else (-1,)
            part = nn.Parameter(_cut(flat, both).view(shape))
            start = both.start - place.start
            pieces.append(Piece(name, parameter, part, start, _cut(reduced, both)))
    return tuple(pieces)


def flatten(places: Places) -> Tensor:
    """Move a unit's parameters into one flat tensor, which they are parts of from then on."""
    first = next(iter(places))
    flat = first.data.new_empty(sum(map(len, places.values())))
    for parameter, place in places.items():
        part = _cut(flat, place).view(parameter.shape)
        part.copy_(parameter.data)
        parameter.data = part
    return flat


def _cut(flat: Tensor, elements: range) -> Tensor:
    return flat[elements.start : elements.stop]
