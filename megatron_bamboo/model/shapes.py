"""What the tensors of each stage take, from the shapes alone.

Chunks are built and run forward once with torch's fake tensors, which have shapes and no elements:
nothing is computed and nothing large is allocated, whatever the model's size, and what a script's
own layers save is counted as it is. What the optimizer and the gradients take is arithmetic.
"""

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.utils import GlobalMemoryBuffer
from torch import Tensor, nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from megatron_bamboo.config import Layout, Options
from megatron_bamboo.execution.local_groups import model_groups
from megatron_bamboo.model.gpt import (
    ChunkPlace,
    Recipe,
    build_chunk,
    places_of_stage,
    prepare_process,
    tied_weight,
    units_of,
)
from megatron_bamboo.model.place import set_current_stage
from megatron_bamboo.model.profile import made_up_batch
from megatron_bamboo.model.randomness import DropoutSeeds
from megatron_bamboo.model.saved_storages import SavedStorages
from megatron_bamboo.model.shard import Shard
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.schedule.footprint import ChunkSizes, StageSizes
from megatron_bamboo.script.args import dtype_of
from megatron_bamboo.script.providers import ForwardStepFunc, ModelProvider

_FLOAT32 = 4
_MOMENTS = 2
_LOSS = 8


def message_size(options: Options, layout: Layout) -> tuple[int, int, int]:
    """The size of what a chunk gives to the next one."""
    shared_by = layout.tensor_size if options.parallel.sequence_parallel else 1
    return (
        options.data.seq_length // shared_by,
        options.training.micro_batch_size,
        options.model.hidden_size,
    )


def message_bytes(options: Options, layout: Layout) -> int:
    """The same in bytes."""
    sequence, batch, hidden = message_size(options, layout)
    return sequence * batch * hidden * dtype_of(options.precision).itemsize


def stage_sizes(
    options: Options,
    layout: Layout,
    shape: PipelineShape,
    vocab: int,
    provider: ModelProvider,
    forward_step: ForwardStepFunc,
) -> tuple[StageSizes, ...]:
    """The sizes of every stage of a pipeline, on workers of the first tensor rank that have the
    first shard of the optimizer's state.

    Args:
        vocab: padded size of the vocabulary.
    """
    groups = model_groups(_fake_group(layout.tensor_size))
    prepare_process(groups)
    recipe = Recipe.of(options, provider, groups, DropoutSeeds(options.training.seed))
    with FakeTensorMode(allow_non_fake_inputs=True), _one_generator(), _own_scratch():
        return tuple(
            _sizes_of(number, options, layout, shape, vocab, recipe, forward_step)
            for number in range(shape.num_stages)
        )


def _sizes_of(
    number: int,
    options: Options,
    layout: Layout,
    shape: PipelineShape,
    vocab: int,
    recipe: Recipe,
    forward_step: ForwardStepFunc,
) -> StageSizes:
    places = places_of_stage(number, shape)
    chunks, units, tied = [], [], 0
    for index, place in enumerate(places):
        set_current_stage(number, index, shape.num_stages, shape.num_chunks)
        chunk = build_chunk(recipe, place)
        if shape.num_chunks > 1:
            chunk.vp_stage = index
        own = [list(parts.parameters()) for parts in units_of(chunk, place).values()]
        mirror = _FLOAT32 * sum(map(_count, own)) + _LOSS * shape.num_microbatches * place.is_last
        saved = _saved_by_forward(chunk, place, options, layout, vocab, forward_step)
        chunks.append(ChunkSizes(saved, mirror))
        units += own
        weight = tied_weight(chunk, place)
        tied += 0 if weight is None else _FLOAT32 * weight.numel()
    stepped = sum(len(_shard(layout).range_in(_count(unit))) for unit in units)
    return StageSizes(
        parameters=sum(parameter.nbytes for unit in units for parameter in unit),
        gradients=2 * _FLOAT32 * sum(map(_count, units)),
        optimizer=sum(_optimizer_bytes(unit, _shard(layout)) for unit in units),
        stepped=_FLOAT32 * stepped,
        tied=tied,
        chunks=tuple(chunks),
    )


def _shard(layout: Layout) -> Shard:
    return Shard(0, layout.num_shards)


def _count(parameters: Iterable[nn.Parameter]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _optimizer_bytes(unit: Sequence[nn.Parameter], shard: Shard) -> int:
    """Moments, a float32 copy of what is in half precision, and torch's count of steps."""
    own, total, end = shard.range_in(_count(unit)), 0, 0
    for parameter in reversed(unit):  # as gradients lie in their buffer
        start, end = end, end + parameter.numel()
        elements = max(0, min(end, own.stop) - max(start, own.start))
        copies = _MOMENTS + (parameter.dtype is not torch.float32)
        total += _FLOAT32 * (copies * elements + bool(elements))
    return total


def _saved_by_forward(
    chunk: GPTModel,
    place: ChunkPlace,
    options: Options,
    layout: Layout,
    vocab: int,
    forward_step: ForwardStepFunc,
) -> int:
    kept: list[Tensor] = list(chunk.parameters())
    if not place.is_first:
        size, dtype = message_size(options, layout), dtype_of(options.precision)
        hidden = torch.empty(size, dtype=dtype).requires_grad_()
        chunk.set_input_tensor(hidden)
        kept.append(hidden)
    batch = made_up_batch(options, vocab, kept[0].device)
    saved = SavedStorages()
    with saved.recording():
        output, loss_func = forward_step(itertools.repeat(batch), chunk)
        if place.is_last:
            output = loss_func(output)[0]
    if not place.is_last:
        kept.append(output)
    return saved.num_bytes(without=kept)


def _fake_group(size: int) -> dist.ProcessGroup | None:
    """A group of workers that share layers, whose collectives give back shapes."""
    if size == 1:
        return None
    group = dist.ProcessGroup(FakeStore(), 0, size)
    kind = dist.ProcessGroup.BackendType.CUSTOM
    group._register_backend(torch.device("cpu"), kind, FakeProcessGroup._create_internal(0, size))
    group._set_default_backend(kind)
    return group


@contextlib.contextmanager
def _one_generator() -> Iterator[None]:
    """Let Megatron's tracker leave the generators alone: nothing is drawn, and it would look at
    numbers that are not there."""
    tracker = get_cuda_rng_tracker()
    tracker.fork = lambda name="": contextlib.nullcontext()
    try:
        yield
    finally:
        del tracker.fork


@contextlib.contextmanager
def _own_scratch() -> Iterator[None]:
    """Let what Megatron's layers keep as scratch memory have shapes alone no longer than this."""
    kept = parallel_state._GLOBAL_MEMORY_BUFFER
    parallel_state._GLOBAL_MEMORY_BUFFER = GlobalMemoryBuffer()
    try:
        yield
    finally:
        parallel_state._GLOBAL_MEMORY_BUFFER = kept
