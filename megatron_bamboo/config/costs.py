"""What forwards and backwards take, as ``--bamboo-costs`` says it."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_bamboo.config.options import BambooOptions
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs


def read_costs(options: BambooOptions, arrangement: Arrangement) -> tuple[Costs, ...]:
    """By pipeline, the costs by which redundant forwards are placed in gaps.

    A profile is of one cut. Where pipelines are cut unlike, their stages take what their units do.

    Raises:
        UserError: the file is not there, or holds no costs of such stages.
    """
    pipelines = arrangement.pipelines
    if options.bamboo_costs is None:
        return (EQUAL_COSTS,) * len(pipelines)
    text = _text(options.bamboo_costs)
    try:
        units = None if arrangement.is_cut_alike else _units(text, arrangement.num_units)
        if units is not None:
            return tuple(_of_stages(units, shape) for shape in pipelines)
        costs = Costs.from_json(text)
        for shape in pipelines:
            costs.check_shape(shape.num_stages, shape.num_chunks)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--bamboo-costs {options.bamboo_costs}: {error}") from error
    return (costs,) * len(pipelines)


def costs_of(options: BambooOptions, arrangement: Arrangement) -> tuple[Costs, ...]:
    """By pipeline the same for pipelines that a job has come to, of which nobody has asked before:
    where the file knows nothing of such stages all are taken to be equal."""
    try:
        return read_costs(options, arrangement)
    except UserError:
        return (EQUAL_COSTS,) * len(arrangement.pipelines)


def read_works(options: BambooOptions, num_units: int) -> Sequence[int]:
    """By unit its forward and backward together, in any unit of time.

    If nothing is known of the units, all layers take the same, and the model's ends nothing.

    Raises:
        UserError: the file is not there, or its units are not this model's.
    """
    units = None
    if options.bamboo_costs is not None:
        text = _text(options.bamboo_costs)
        try:
            units = _units(text, num_units)
        except (ValueError, RecursionError) as error:
            raise UserError(f"--bamboo-costs {options.bamboo_costs}: {error}") from error
    return (0, *[1] * (num_units - 2), 0) if units is None else units.works().ticks


def _text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"--bamboo-costs {path}: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"--bamboo-costs {path} is no text: {error}") from error


def _units(text: str, num_units: int) -> UnitCosts | None:
    """The costs by unit that a text holds; None if it holds others alone."""
    values = json.loads(text)
    if not isinstance(values, dict) or "units" not in values:
        return None
    costs = UnitCosts.from_json(text)
    if len(costs.units) != num_units:
        raise ValueError(f"it has costs of {len(costs.units)} units, the model has {num_units}")
    return costs


def _of_stages(costs: UnitCosts, shape: PipelineShape) -> Costs:
    def by_stage(seconds: Sequence[float]) -> tuple[tuple[float, ...], ...]:
        return tuple(
            tuple(sum(seconds[first:past]) for first, past in shape.spans_of(stage))
            for stage in range(shape.num_stages)
        )

    units = costs.units
    return Costs(by_stage([u.forward for u in units]), by_stage([u.backward for u in units]))
