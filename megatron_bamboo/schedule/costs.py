"""What forwards, backwards and messages take, given or profiled: the measure of a schedule.

The unit is free; whoever shows times says which it is. As JSON it is an object with ``forward`` and
``backward`` (a number for all, or a list with one a stage; in the place of a stage's number a list
with one a chunk) and ``latency``. ``bamboo profile`` writes the costs of the model's units into the
same object, which are the planner's (``planner/layers.py``).
"""

import json
import math
from dataclasses import asdict, dataclass
from typing import Self

from megatron_bamboo.schedule.actions import Action, Op

OF_UNITS = ("units", "message_bytes")
"""What else a profile has."""

PerChunk = float | tuple[float, ...]
Cost = float | tuple[PerChunk, ...]


@dataclass(frozen=True, slots=True)
class Costs:
    """The time of one microbatch in a stage's chunk, and of one message on its way.

    A redundant forward takes what the forward takes.

    Raises:
        ValueError: for a time that cannot be.
    """

    forward: Cost = 1.0
    backward: Cost = 2.0
    latency: float = 0.0

    def __post_init__(self) -> None:
        for name, cost in (("forward", self.forward), ("backward", self.backward)):
            if not all(math.isfinite(number) and number > 0 for number in _numbers(cost)):
                raise ValueError(f"{name} costs {cost}: each must be above 0 and finite")
        if not (math.isfinite(self.latency) and self.latency >= 0):
            raise ValueError(f"the latency is {self.latency}: it must be 0 or above, and finite")

    def of(self, action: Action) -> float:
        """The time an action takes its worker."""
        match action.op:
            case Op.F | Op.RF:
                return _at(self.forward, action)
            case Op.B:
                return _at(self.backward, action)
            case _:
                return 0.0

    def check_shape(self, num_stages: int, num_chunks: int) -> None:
        """Refuse costs that are not those of so many stages and chunks.

        Raises:
            ValueError: naming the list that is too short or too long.
        """
        for name, cost in (("forward", self.forward), ("backward", self.backward)):
            stages = cost if isinstance(cost, tuple) else ()
            if stages and len(stages) != num_stages:
                raise ValueError(f"{name} has costs of {len(stages)} stages, not of {num_stages}")
            for stage, chunks in enumerate(stages):
                if isinstance(chunks, tuple) and len(chunks) != num_chunks:
                    raise ValueError(
                        f"{name} has costs of {len(chunks)} chunks for stage {stage}, "
                        f"not of {num_chunks}"
                    )

    def to_json(self) -> str:
        """The text that ``from_json`` reads."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The costs that a text holds.

        Raises:
            ValueError: it does not hold what the module describes.
        """
        try:
            values = json.loads(text, parse_int=float)
        except json.JSONDecodeError as error:
            raise ValueError(f"costs are not JSON: {error}") from error
        known = {"latency", *OF_UNITS}
        if not isinstance(values, dict) or values.keys() - known != {"forward", "backward"}:
            raise ValueError('costs are an object like {"forward": 1, "backward": 2, "latency": 0}')
        return cls(
            forward=_parse_cost("forward", values["forward"]),
            backward=_parse_cost("backward", values["backward"]),
            latency=_parse_number("latency", values.get("latency", 0.0)),
        )


def _at(cost: Cost, action: Action) -> float:
    of_stage = cost[action.stage] if isinstance(cost, tuple) else cost
    if not isinstance(of_stage, tuple):
        return of_stage
    assert action.chunk is not None
    return of_stage[action.chunk]


def _numbers(cost: Cost) -> list[float]:
    if not isinstance(cost, tuple):
        return [cost]
    return [number for part in cost for number in _numbers(part)]


def _parse_cost(name: str, value: object) -> Cost:
    if isinstance(value, list) and value:
        return tuple(_parse_chunks(name, part) for part in value)
    return _parse_number(name, value)


def _parse_chunks(name: str, value: object) -> PerChunk:
    if isinstance(value, list) and value:
        return tuple(_parse_number(name, part) for part in value)
    return _parse_number(name, value)


def _parse_number(name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(
            f"{name} has {json.dumps(value)} where a number is due; costs are a number, a list by "
            "stage like [1, 2], or lists by stage and chunk like [[1, 2], [3, 4]]"
        )
    return float(value)


# The usual proportion of a backward to a forward, in any unit.
EQUAL_COSTS = Costs(forward=1.0, backward=2.0)
