"""What each unit of a model takes on this machine, of time and of memory, for the planner.

Each unit is built as a stage of its own, which a pipeline as long as the model would have: the
embedding alone, each layer, the head alone. Times are measured as those of chunks are; bytes follow
from shapes, of one worker. A tied head is counted with a copy of the embedding's weight, which only
a pipeline of one stage saves, and the optimizer's state as if pipelines did not share it.
"""

from collections.abc import Iterator

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.execution.local_groups import model_groups
from megatron_bamboo.model.gpt import Recipe, prepare_process
from megatron_bamboo.model.place import no_chunks
from megatron_bamboo.model.profile import time_chunks
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.shapes import message_bytes, stage_sizes
from megatron_bamboo.model.stage import build_stage
from megatron_bamboo.planner.arrangement import PipelineShape, unit_names
from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts
from megatron_bamboo.schedule.footprint import StageSizes
from megatron_bamboo.script.providers import ForwardStepFunc, ModelProvider


def measure_units(
    options: Options,
    layout: Layout,
    vocab: int,
    provider: ModelProvider,
    forward_step: ForwardStepFunc,
    repeats: int,
) -> UnitCosts:
    """The median seconds of ``repeats`` passes of every unit after one to warm up, and its bytes.

    Args:
        vocab: padded size of the vocabulary.
    """
    names = unit_names(options.model.num_layers + 2)
    one_each = PipelineShape(tuple((n, n + 1) for n in range(len(names))), num_microbatches=1)
    groups = model_groups()
    prepare_process(groups)
    recipe = Recipe.of(options, provider, groups, DropoutSeeds(options.training.seed))
    times = []
    with no_chunks():
        for number in range(one_each.num_stages):
            stage = build_stage(number, one_each, options.optimizer, recipe)
            times += time_chunks(stage, options, one_each, forward_step, vocab, repeats)
        sizes = stage_sizes(options, layout, one_each, vocab, provider, forward_step)
    units = (
        Unit(name, forward, backward, _bytes(size))
        for name, (forward, backward), size in zip(names, times, sizes, strict=True)
    )
    return UnitCosts(tuple(units), message_bytes(options, layout))


def units_table(costs: UnitCosts) -> Iterator[str]:
    """The costs of every unit as a Markdown table, in milliseconds and MB."""
    yield "| unit | forward (ms) | backward (ms) | state (MB) | activations (MB) |"
    yield "| --- | ---: | ---: | ---: | ---: |"
    for unit in costs.units:
        assert unit.bytes is not None
        sizes = f"{unit.bytes.state / 1e6:.3f} | {unit.bytes.activations / 1e6:.3f}"
        yield f"| {unit.name} | {unit.forward * 1e3:.3f} | {unit.backward * 1e3:.3f} | {sizes} |"


def _bytes(sizes: StageSizes) -> UnitBytes:
    (chunk,) = sizes.chunks
    return UnitBytes(sizes.parameters + sizes.gradients + sizes.optimizer, chunk.forward)
