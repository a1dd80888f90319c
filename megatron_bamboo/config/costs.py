"""What forwards and backwards take, as ``--bamboo-costs`` says it."""

import json
from collections.abc import Sequence
from pathlib import Path

from megatron_bamboo.config.options import BambooOptions, Options
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import Arrangement, PipelineShape
from megatron_bamboo.planner.layers import UnitCosts
from megatron_bamboo.schedule.costs import EQUAL_COSTS, Costs


def read_costs(options: BambooOptions, arrangement: Arrangement) -> tuple[Costs, ...]:
    """By pipeline, the costs by which redundant forwards are placed in gaps.

    A profile is of one cut. Where pipelines have other stages, these take what their units do.

    Raises:
        UserError: the file is not there, or holds no costs of such stages.
    """
    pipelines = arrangement.pipelines
    if options.bamboo_costs is None:
        return (EQUAL_COSTS,) * len(pipelines)
    text = _text(options.bamboo_costs)
    try:
        is_of_stages = arrangement.is_cut_alike and _fit(Costs.from_json(text), pipelines[0])
        units = None if is_of_stages else _units(text, arrangement.num_units)
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


def _fit(costs: Costs, shape: PipelineShape) -> bool:
    try:
        costs.check_shape(shape.num_stages, shape.num_chunks)
    except ValueError:
        return False
    return True


def read_unit_bytes(options: Options, vocab: int) -> tuple[int, ...]:
    """By unit the bytes of its state, for comparing what moves: as a profile has them, else what a
    plain GPT of this shape has for each parameter. A script's own layers may differ.

    Args:
        vocab: padded size of the vocabulary.

    Raises:
        UserError: the profile is not there, or its units are not this model's.
    """
    model, num_units = options.model, options.model.num_layers + 2
    path = options.bamboo.bamboo_costs
    try:
        units = None if path is None else _units(_text(path), num_units)
    except (ValueError, RecursionError) as error:
        raise UserError(f"--bamboo-costs {path}: {error}") from error
    sizes = [] if units is None else [unit.bytes for unit in units.units]
    if sizes and all(size is not None for size in sizes):
        return tuple(size.state for size in sizes if size is not None)
    width = model.hidden_size
    layer = width * (4 * width + (3 if model.swiglu else 2) * model.feed_forward_size)
    learned = model.position_embedding_type == "learned_absolute"
    embedding = width * (vocab + model.max_position_embeddings * learned)
    # Parameter, gradient and two moments.
    return tuple(16 * n for n in (embedding, *[layer] * model.num_layers, width * vocab))


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
