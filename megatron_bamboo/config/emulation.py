"""What emulated layers and messages take, from the flags that say so.

With them the schedule of a large model runs on a small machine: see ``model/emulated.py``.
"""

from megatron_bamboo.config.options import BambooOptions, ModelOptions, flag_of
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.schedule.costs import Costs

EMULATED = "emulated"
LONGEST_MS = 60_000.0
LEAST_BANDWIDTH, LARGEST_BANDWIDTH = 1e-3, 1e6
_TIMES = ("bamboo_emulated_forward_ms", "bamboo_emulated_backward_ms")
_FLAGS = (*_TIMES, "bamboo_emulated_bandwidth")


def layer_seconds(text: str, num_layers: int) -> tuple[float, ...]:
    """The time of each layer, from milliseconds: a number for all, or a list with one a layer.

    Raises:
        ValueError: saying what is due.
    """
    due = f"give a number above 0, or {num_layers} of them like 50,60"
    try:
        times = tuple(float(word) / 1e3 for word in text.split(","))
    except ValueError:
        raise ValueError(due) from None
    if not all(0 < time <= LONGEST_MS / 1e3 for time in times):
        raise ValueError(f"{due}, each at most {LONGEST_MS:g}")
    if len(times) not in (1, num_layers):
        raise ValueError(f"there are {len(times)} times for {num_layers} layers: {due}")
    return times * num_layers if len(times) == 1 else times


def known_bandwidth(model: ModelOptions, bamboo: BambooOptions) -> float | None:
    """MB/s that a node's link brings it; None where nobody has said it."""
    if model.transformer_impl == EMULATED:
        return bamboo.bamboo_emulated_bandwidth
    return bamboo.bamboo_link_bandwidth


def emulated_costs(model: ModelOptions, bamboo: BambooOptions, shape: PipelineShape) -> Costs:
    """What each stage's chunks take, in seconds; for options that are in order."""
    forward, backward = (
        _by_chunk(layer_seconds(getattr(bamboo, name), model.num_layers), shape) for name in _TIMES
    )
    return Costs(forward, backward)


def _by_chunk(times: tuple[float, ...], shape: PipelineShape) -> tuple[tuple[float, ...], ...]:
    by_unit = (0.0, *times, 0.0)
    return tuple(
        tuple(sum(by_unit[first:past]) for first, past in shape.spans_of(stage))
        for stage in range(shape.num_stages)
    )


def check_emulation(model: ModelOptions, bamboo: BambooOptions) -> None:
    """Times and bandwidth belong to emulated layers, and these need both times.

    Raises:
        UserError: in one line.
    """
    given = {name for name in _FLAGS if getattr(bamboo, name) is not None}
    if model.transformer_impl != EMULATED:
        for name in sorted(given):
            raise UserError(f"{flag_of(name)} belongs to --transformer-impl {EMULATED}")
        return
    for name in _TIMES:
        if name not in given:
            raise UserError(f"--transformer-impl {EMULATED} needs {flag_of(name)}")
        text = getattr(bamboo, name)
        try:
            layer_seconds(text, model.num_layers)
        except ValueError as error:
            raise UserError(f"{flag_of(name)} {text}: {error}") from error
    bandwidth = bamboo.bamboo_emulated_bandwidth
    if bandwidth is not None and not LEAST_BANDWIDTH <= bandwidth <= LARGEST_BANDWIDTH:
        raise UserError(
            f"--bamboo-emulated-bandwidth must be between {LEAST_BANDWIDTH:g} and "
            f"{LARGEST_BANDWIDTH:g} MB/s, not {bandwidth:g}"
        )
