"""What each unit of a model takes on this machine, of time and of memory, for the planner.

Each unit is built as a stage of its own, which a pipeline as long as the model would have: the
embedding alone, each layer, the head alone. Times are measured as those of chunks are; bytes follow
from shapes, of one worker. A tied head is counted with a copy of the embedding's weight, which only
a pipeline of one stage saves, and the optimizer's state as if pipelines did not share it.
"""

from collections.abc import Iterator
from dataclasses import replace

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.execution.local_groups import model_groups
from megatron_bamboo.model.gpt import ChunkPlace, Recipe, build_chunk, prepare_process
from megatron_bamboo.model.place import no_chunks, set_current_stage
from megatron_bamboo.model.profile import time_chunks
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.shapes import message_bytes, sizes_of
from megatron_bamboo.model.shard import WHOLE
from megatron_bamboo.model.stage import Stage
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
    places = _places(options.model.num_layers)
    one_each = replace(layout, num_stages=len(places), num_chunks=1)
    groups = model_groups()
    prepare_process(groups)
    recipe = Recipe.of(options, provider, groups, DropoutSeeds(options.training.seed))
    times = []
    with no_chunks():
        for number, place in enumerate(places.values()):
            set_current_stage(number, 0, len(places), 1)
            chunks = {place: build_chunk(recipe, place)}
            stage = Stage(number, chunks, options.optimizer, recipe, WHOLE)
            times += time_chunks(stage, options, one_each, forward_step, vocab, repeats)
        stages = [(place,) for place in places.values()]
        sizes = sizes_of(stages, options, one_each, vocab, provider, forward_step)
    units = (
        Unit(name, forward, backward, _bytes(size))
        for name, (forward, backward), size in zip(places, times, sizes, strict=True)
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


def _places(num_layers: int) -> dict[str, ChunkPlace]:
    """By name each unit alone."""
    layers = {f"layer{n}": ChunkPlace(range(n, n + 1), False, False) for n in range(num_layers)}
    first, last = range(0), range(num_layers, num_layers)
    return {
        "embedding": ChunkPlace(first, is_first=True, is_last=False),
        **layers,
        "head": ChunkPlace(last, is_first=False, is_last=True),
    }


def _bytes(sizes: StageSizes) -> UnitBytes:
    (chunk,) = sizes.chunks
    return UnitBytes(sizes.parameters + sizes.gradients + sizes.optimizer, chunk.forward)
