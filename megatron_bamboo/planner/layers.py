"""What each unit of the model costs: the embedding, the layers and the head, in their order.

``bamboo profile`` measures it on the device that will train; as JSON it is the object that
``--bamboo-costs`` reads, with ``units`` beside the costs of the chunks:

    {"units": [{"name": "embedding", "forward": 0.001, "backward": 0.002,
                "state_bytes": 4000000, "activation_bytes": 65536}, ..],
     "message_bytes": 65536}

Bytes may be left out, of all units; then memory is taken to be free.
"""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class UnitBytes:
    """What one unit takes of a worker's memory."""

    state: int
    """Parameters, gradients as accumulated and as reduced, and optimizer state."""
    activations: int
    """What the forward of one microbatch saves for its backward."""


@dataclass(frozen=True, slots=True)
class Unit:
    """One unit, with the seconds that one microbatch takes in it.

    Raises:
        ValueError: for a cost that cannot be.
    """

    name: str
    forward: float
    backward: float
    bytes: UnitBytes | None = None

    def __post_init__(self) -> None:
        for what, seconds in (("forward", self.forward), ("backward", self.backward)):
            if not (math.isfinite(seconds) and seconds > 0):
                raise ValueError(f"{self.name}: its {what} takes {seconds}: it must be above 0")
        if self.bytes is not None and min(self.bytes.state, self.bytes.activations) < 0:
            raise ValueError(f"{self.name} has {self.bytes}: bytes are 0 or above")


@dataclass(frozen=True, slots=True)
class UnitCosts:
    """All units of a model.

    Raises:
        ValueError: there is none, or only some have bytes.
    """

    units: tuple[Unit, ...]
    message_bytes: int = 0
    """What one stage gives to the next, of one microbatch."""

    def __post_init__(self) -> None:
        if not self.units:
            raise ValueError("there are no units: give one for each layer at least")
        if len({unit.bytes is None for unit in self.units}) > 1:
            raise ValueError("some units have bytes and some have not: give them for all or none")
        if self.message_bytes < 0:
            raise ValueError(f"a message has {self.message_bytes} bytes: give 0 or more")

    @property
    def has_bytes(self) -> bool:
        """Whether it is known what the units take of memory."""
        return self.units[0].bytes is not None

    def works(self) -> "Works":
        """What the planner counts in."""
        exact = [Fraction(repr(u.forward)) + Fraction(repr(u.backward)) for u in self.units]
        per_second = math.lcm(*(work.denominator for work in exact))
        return Works(tuple(int(work * per_second) for work in exact), per_second)

    def to_json(self) -> dict[str, Any]:
        """The members of the object that the module describes."""
        units = [
            {"name": unit.name, "forward": unit.forward, "backward": unit.backward}
            | {f"{name}_bytes": size for name, size in _sizes(unit).items()}
            for unit in self.units
        ]
        return {"units": units, "message_bytes": self.message_bytes}

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The costs by unit that a text holds; what else is in it is left alone.

        Raises:
            ValueError: it does not hold what the module describes.
        """
        try:
            values = json.loads(text)
        except json.JSONDecodeError as error:
            raise ValueError(f"costs are not JSON: {error}") from error
        units = values.get("units") if isinstance(values, dict) else None
        if not isinstance(units, list):
            raise ValueError(
                'there are no costs by unit: an object like {"units": [{"forward": 1, '
                '"backward": 2}, ..]} is due, as bamboo profile writes it'
            )
        parsed = tuple(_parse_unit(number, unit) for number, unit in enumerate(units))
        return cls(parsed, _parse_bytes("message_bytes", values.get("message_bytes", 0)))


@dataclass(frozen=True, slots=True)
class Works:
    """Forward and backward of each unit together, in whole ticks.

    A tick is the greatest fraction of a second that all costs are multiples of, as they are
    written. So sums are exact, equal works are equal, and ties are ties.
    """

    ticks: tuple[int, ...]
    ticks_a_second: int

    def seconds(self, ticks: int) -> float:
        """The same time in seconds."""
        return float(Fraction(ticks, self.ticks_a_second))


def _sizes(unit: Unit) -> Mapping[str, int]:
    if unit.bytes is None:
        return {}
    return {"state": unit.bytes.state, "activation": unit.bytes.activations}


def _parse_unit(number: int, value: object) -> Unit:
    if not isinstance(value, dict):
        raise ValueError(f'unit {number} is {value}, not an object like {{"forward": 1, ..}}')
    name = str(value.get("name", f"unit {number}"))
    unknown = value.keys() - {"name", "forward", "backward", "state_bytes", "activation_bytes"}
    if unknown:
        raise ValueError(f"{name} has {sorted(unknown)[0]}, which is no cost of a unit")
    forward, backward = (
        _parse_seconds(f"{name}: {what}", value.get(what)) for what in ("forward", "backward")
    )
    if not {"state_bytes", "activation_bytes"} & value.keys():
        return Unit(name, forward, backward)
    state, activations = (
        _parse_bytes(f"{name}: {what}", value.get(what))
        for what in ("state_bytes", "activation_bytes")
    )
    return Unit(name, forward, backward, UnitBytes(state, activations))


def _parse_seconds(what: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{what} is {json.dumps(value)}: it must be a number of seconds")
    return float(value)


def _parse_bytes(what: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{what} is {json.dumps(value)}: it must be a whole number of bytes")
    return value


def prefix_sums(values: Sequence[int]) -> tuple[int, ...]:
    """By place the sum of all before it: a range's sum is a difference of two."""
    sums = [0]
    for value in values:
        sums.append(sums[-1] + value)
    return tuple(sums)
