"""What each worker of a run will need in memory, before it runs."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from megatron_bamboo.config import Layout, Options, ReplicaMemory, read_costs
from megatron_bamboo.config.emulation import EMULATED, emulated_costs
from megatron_bamboo.errors import UserError
from megatron_bamboo.model.shapes import message_bytes, stage_sizes
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.schedule.footprint import Category, Footprint, footprint, held_by_device
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.link_load import mirrors_too_many
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import add_redundancy
from megatron_bamboo.schedule.schedule import Schedule
from megatron_bamboo.schedule.tail import add_tail
from megatron_bamboo.script.providers import ForwardStepFunc, ModelProvider

_MEGABYTE = 1e6


@dataclass(frozen=True, slots=True)
class NodeFootprint:
    """What a worker needs that runs a stage from the start, and shadows another."""

    pipeline: int
    """The first one of this shape."""
    stage: int
    replica: int | None
    needs: Footprint


def predict(
    options: Options,
    layout: Layout,
    vocab: int,
    provider: ModelProvider,
    forward_step: ForwardStepFunc,
) -> tuple[NodeFootprint, ...]:
    """By pipeline and stage, what its worker needs in an undisturbed step.

    Of pipelines that are alike only the first is there.

    Args:
        vocab: padded size of the vocabulary.
    """
    memory = options.bamboo.bamboo_replica_memory
    keeps, on_host = memory is not ReplicaMemory.RECOMPUTE, memory is ReplicaMemory.HOST
    message, nodes = message_bytes(options, layout), list[NodeFootprint]()
    for number, shape in _different(layout):
        sizes = stage_sizes(options, layout, shape, vocab, provider, forward_step)
        schedule = _schedule(options, layout, number)
        nodes += (
            NodeFootprint(
                number,
                stage,
                next(iter(schedule.replicas_of(stage)), None),
                footprint(schedule, stage, sizes, message, keeps, on_host),
            )
            for stage in range(shape.num_stages)
        )
    return tuple(nodes)


def check_links(
    options: Options,
    layout: Layout,
    vocab: int,
    provider: ModelProvider,
    forward_step: ForwardStepFunc,
    bandwidth: float,
) -> None:
    """Refuse mirrored gradients that links of so many MB/s cannot carry.

    Raises:
        UserError: with how many they would carry.
    """
    bamboo, is_emulated = options.bamboo, options.model.transformer_impl == EMULATED
    costs = read_costs(bamboo, layout.arrangement)
    for number, shape in _different(layout):
        reason = mirrors_too_many(
            _schedule(options, layout, number, with_tail=False),
            emulated_costs(options.model, bamboo, shape) if is_emulated else costs[number],
            stage_sizes(options, layout, shape, vocab, provider, forward_step),
            message_bytes(options, layout),
            bandwidth * _MEGABYTE,
        )
        if reason is not None:
            raise UserError(
                f"--bamboo-mirror-gradients {bamboo.bamboo_mirror_gradients}: at {bandwidth:g} "
                f"MB/s {reason}: give no more"
            )


def table(nodes: Sequence[NodeFootprint], options: Options) -> Iterator[str]:
    """What is needed, in Markdown: at the peak, and each category when it takes most."""
    on_host = options.bamboo.bamboo_replica_memory is ReplicaMemory.HOST
    names = ["pipeline"] * _are_unlike(nodes)
    heads = [*names, "stage", "replica of", *Category]
    yield "At the peak, in MB for each worker:"
    yield from _head([*heads, "together"])
    for node in nodes:
        places = [str(node.pipeline)] * len(names)
        yield _row(node, places, node.needs.at_peak, held_by_device(node.needs.at_peak, on_host))
    yield ""
    yield "Each when it takes most:"
    yield from _head(heads)
    for node in nodes:
        yield _row(node, [str(node.pipeline)] * len(names), node.needs.largest)
    if on_host:
        yield ""
        yield "Redundant activations are in host memory, and not in what is together."


def to_json(nodes: Sequence[NodeFootprint]) -> str:
    """The same in bytes, for programs."""
    return json.dumps(
        [
            {
                "pipeline": node.pipeline,
                "stage": node.stage,
                "replica": node.replica,
                "at_peak": dict(node.needs.at_peak),
                "largest": dict(node.needs.largest),
                "where": str(node.needs.where),
            }
            for node in nodes
        ]
    )


def _different(layout: Layout) -> Iterator[tuple[int, PipelineShape]]:
    """The pipelines that are unlike all before them, and their numbers."""
    pipelines = layout.arrangement.pipelines
    for number, shape in enumerate(pipelines):
        if shape not in pipelines[:number]:
            yield number, shape


def _schedule(options: Options, layout: Layout, pipeline: int, with_tail: bool = True) -> Schedule:
    bamboo, shape = options.bamboo, layout.arrangement.pipelines[pipeline]
    costs = read_costs(bamboo, layout.arrangement)[pipeline]
    compute = compute_schedule(shape.num_stages, shape.num_chunks, shape.num_microbatches)
    redundancy, mirrors = bamboo.bamboo_redundancy, bamboo.bamboo_mirror_gradients
    protected = add_redundancy(compute, redundancy, costs, mirrors)
    if not with_tail:
        return lower(protected)
    is_tied = not options.model.untie_embeddings_and_output_weights
    return add_tail(lower(protected), is_tied, layout.num_shards > 1)


def _head(names: Sequence[str]) -> Iterator[str]:
    yield f"| {' | '.join(names)} |"
    yield f"|{' ---: |' * len(names)}"


def _are_unlike(nodes: Sequence[NodeFootprint]) -> bool:
    return len({node.pipeline for node in nodes}) > 1


def _row(
    node: NodeFootprint, places: Sequence[str], sizes: Mapping[Category, int], *more: int
) -> str:
    replica = "" if node.replica is None else str(node.replica)
    numbers = (f"{size / _MEGABYTE:,.1f}" for size in (*map(sizes.__getitem__, Category), *more))
    return f"| {' | '.join([*places, str(node.stage), replica, *numbers])} |"
