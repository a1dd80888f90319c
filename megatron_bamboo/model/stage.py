"""Everything that a worker holds of one stage: modules, gradient buffers, optimizer, scheduler.

State is kept by unit. Each unit has a gradient buffer of its own (Megatron-core's
``DistributedDataParallel`` over the unit's modules) and an optimizer of its own, so that a unit
can be reduced, stepped, replicated and moved alone, with the same bits wherever it is. What does
not fit:

* DDP's reduction works in place and on one group for good. Reductions here are out of place (their
  inputs must live until the commit) and on groups that change, so DDP only accumulates.
* Megatron's optimizers sum the gradient norm by worker; here it comes from the commit vector.
* They clip each parameter's gradient; here all of a stage are one tensor.
* Its distributed optimizer shards by a group of its own for good, with gradients reduced in place.
  Here its plain optimizers step the pieces of a shard (``shard.py``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.models.gpt import GPTModel
from megatron.core.optimizer import (
    ChainedOptimizer,
    OptimizerConfig,
    get_megatron_optimizer,
    get_standard_config_overrides,
)
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import param_is_not_tensor_parallel_duplicate
from torch import Tensor, nn

from megatron_bamboo.config import OptimizerOptions
from megatron_bamboo.model.gpt import (
    ChunkPlace,
    Recipe,
    build_chunk,
    places_of_stage,
    tied_weight,
    units_of,
)
from megatron_bamboo.model.place import set_current_stage
from megatron_bamboo.model.shard import WHOLE, Piece, Shard, flatten, pieces_of, whole_pieces
from megatron_bamboo.planner.arrangement import PipelineShape


@dataclass(frozen=True, slots=True)
class Unit:
    """A unit's gradient buffer and optimizer on this worker."""

    name: str
    buffer: DistributedDataParallel
    optimizer: ChainedOptimizer
    reduced: Tensor  # out-of-place result of the reduction, as long as the gradient buffer
    parameters: tuple[nn.Parameter, ...]
    pieces: tuple[Piece, ...]  # what the optimizer steps
    shard: Shard
    flat: Tensor | None  # all parameters, where they are gathered after a step

    @property
    def gradient(self) -> Tensor:
        """The gradient accumulated by this worker, one flat tensor."""
        (buffer,) = self.buffer.buffers
        return buffer.grad_data

    def reduced_part(self, parameter: nn.Parameter) -> Tensor:
        """The part of the reduced gradient that belongs to one parameter."""
        (buffer,) = self.buffer.buffers
        start, end, _bucket = buffer.param_index_map[parameter]
        return self.reduced[start:end]

    @property
    def stepped_gradient(self) -> Tensor:
        """The part of the reduced gradient that this worker steps."""
        own = self.shard.range_in(self.reduced.numel())
        return self.reduced[own.start : own.stop]

    def shards_of_parameters(self) -> list[Tensor]:
        """What each pipeline's worker steps of the parameters, in their own memory."""
        assert self.flat is not None, f"the parameters of {self.name} are not shared out"
        shards = [Shard(number, self.shard.count) for number in range(self.shard.count)]
        ranges = [shard.range_in(self.flat.numel()) for shard in shards]
        return [self.flat[elements.start : elements.stop] for elements in ranges]

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """The unit's parameters by name, the same on every holder."""
        yield from self.buffer.module.named_parameters()

    def step(self) -> None:
        """The optimizer step, on the reduced gradient where it lies."""
        accumulated = [getattr(piece.part, "main_grad", None) for piece in self.pieces]
        for piece in self.pieces:
            piece.part.main_grad = piece.gradient.view(piece.part.shape)
        self.optimizer.prepare_grads()
        for piece, gradient in zip(self.pieces, accumulated, strict=True):
            piece.part.main_grad = gradient
        self.optimizer.step_with_ready_grads()


class Stage:
    """One stage on one worker, as its primary or as a replica."""

    def __init__(
        self,
        number: int,
        chunks: Mapping[ChunkPlace, GPTModel],
        options: OptimizerOptions,
        recipe: Recipe,
        shard: Shard,
    ) -> None:
        self.number = number
        self.chunks = tuple(chunks.values())
        self._units_of_chunks = [tuple(units_of(chunk, place)) for place, chunk in chunks.items()]
        config = _config(options, recipe.dtype)
        self.reduced, self.units = _make_units(chunks, config, recipe.groups, shard)
        self.shard = shard
        self._clip = options.clip_grad
        self._loss_scale = recipe.loss_scale
        self._tensor_group = recipe.groups.tp
        roles = [(place, tied_weight(chunk, place)) for place, chunk in chunks.items()]
        self._tied = next(((place, w) for place, w in roles if w is not None), None)

    @property
    def tied_unit(self) -> str | None:
        """The unit with a weight that another stage has a copy of, if there is one."""
        if self._tied is None:
            return None
        place, _weight = self._tied
        return "embedding" if place.is_first else "head"

    def start_step(self) -> None:
        """Forget the gradients of the step before."""
        for unit in self.units.values():
            unit.buffer.zero_grad_buffer()
            # The optimizer step left its gradient as ``grad``: the first backward would add to it.
            unit.optimizer.zero_grad()

    def gradients(self, chunk: int) -> tuple[Tensor, ...]:
        """By unit of a chunk, the gradient accumulated by this worker."""
        return tuple(self.units[name].gradient for name in self._units_of_chunks[chunk])

    def stepped_gradient(self) -> Tensor:
        """The reduced gradients that the holders of this stage in this pipeline step."""
        if self.shard.count == 1:
            return self.reduced
        return torch.cat([unit.stepped_gradient for unit in self.units.values()])

    def set_stepped_gradient(self, gradient: Tensor) -> None:
        """Take what ``stepped_gradient`` of another holder gave."""
        parts = [unit.stepped_gradient for unit in self.units.values()]
        for part, given in zip(parts, gradient.split([len(p) for p in parts]), strict=True):
            part.copy_(given)

    def tied_gradient(self) -> Tensor:
        """The part of the reduced gradient that belongs to the tied weight's copy here."""
        unit = self.tied_unit
        assert self._tied and unit, f"stage {self.number} has no role of a tied weight"
        return self.units[unit].reduced_part(self._tied[1])

    def sum_sequence_parallel(self, unit: Unit) -> None:
        """Add up what each tensor rank has of the gradients of norms and biases, in ``reduced``.

        With sequence parallelism each saw only its part of the sequence (as Megatron-core's
        ``_allreduce_non_tensor_model_parallel_grads``).
        """
        for parameter in unit.parameters:
            if getattr(parameter, "sequence_parallel", False):
                dist.all_reduce(unit.reduced_part(parameter), group=self._tensor_group)

    def squared_norm(self, unit: Unit) -> float:
        """Sum of squares of a unit's reduced gradient, each parameter counted once in the model.

        A tied weight counts in the embedding, what all tensor ranks hold alike in the first one.
        """
        norms = [
            torch.linalg.vector_norm(unit.reduced_part(parameter))
            for parameter in unit.parameters
            if self._counts(unit, parameter)
        ]
        # One transfer from the device, and a sum in double precision.
        return sum(norm**2 for norm in torch.stack(norms).tolist()) if norms else 0.0

    def _counts(self, unit: Unit, parameter: nn.Parameter) -> bool:
        is_tied = self._tied is not None and parameter is self._tied[1]
        if is_tied and unit.name != "embedding":
            return False
        return bool(param_is_not_tensor_parallel_duplicate(parameter, self._tensor_group))

    def apply(self, gradient_norm: float) -> None:
        """The purely local optimizer step, on the reduced gradients, which it changes in place.

        Args:
            gradient_norm: of the whole model's gradient, unscaled.
        """
        self._loss_scale.unscale(self.reduced)
        # Megatron-core's rule and torch's arithmetic, over all parameters at once.
        if 0.0 < self._clip < gradient_norm + 1e-6:
            self.reduced.mul_(self._clip / (torch.tensor(gradient_norm) + 1e-6))
        for unit in self.units.values():
            unit.step()

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the stage's state as ``unit/parameter/kind``.

        Of an optimizer's tensor that is not here whole, some elements: ``unit/parameter/kind@17``
        are those from the 17th on.
        """
        for unit in self.units:
            yield from self.state_of(unit)

    def state_of(self, unit_name: str) -> Iterator[tuple[str, Tensor]]:
        """The tensors of one unit among these."""
        unit = self.units[unit_name]
        for name, parameter in unit.named_parameters():
            yield f"{unit.name}/{name}/parameter", parameter.detach()
        for piece in unit.pieces:
            for kind, value in _optimizer_state(unit, piece):
                yield f"{unit.name}/{piece.name}/{kind}", value


def build_stage(
    number: int,
    shape: PipelineShape,
    optimizer: OptimizerOptions,
    recipe: Recipe,
    shard: Shard = WHOLE,
    draws: bool = True,
) -> Stage:
    """Build a stage with its initial weights, the same on every worker that holds it.

    Args:
        shape: of the pipeline that it belongs to.
        shard: the part of each unit that this worker's optimizer has.
        draws: False where its state is to come, so that initial weights would be drawn in vain.
    """
    chunks = {}
    for index, place in enumerate(places_of_stage(number, shape)):
        # What a provider asks Megatron's global state for.
        set_current_stage(number, index, shape.num_stages, shape.num_chunks)
        chunk = chunks[place] = build_chunk(recipe, place, draws)
        if shape.num_chunks > 1:
            # What Megatron's users ask a chunk of an interleaved model for.
            chunk.vp_stage = index
    return Stage(number, chunks, optimizer, recipe, shard)


def build_scheduler(
    stages: Mapping[int, Stage], options: OptimizerOptions, train_iters: int, batch: int
) -> OptimizerParamScheduler:
    """Megatron's learning-rate scheduler over all units that a worker holds; it counts samples."""
    decay_iters = options.lr_decay_iters or train_iters
    return OptimizerParamScheduler(
        _all_optimizers(stages),
        init_lr=options.lr_warmup_init,
        max_lr=options.lr,
        min_lr=options.min_lr,
        lr_warmup_steps=options.lr_warmup_iters * batch,
        lr_decay_steps=decay_iters * batch,
        lr_decay_style=options.lr_decay_style,
        start_wd=options.weight_decay,
        end_wd=options.weight_decay,
        wd_incr_steps=train_iters * batch,
        wd_incr_style="constant",
    )


def follow_stages(scheduler: OptimizerParamScheduler, stages: Mapping[int, Stage]) -> None:
    """Let a scheduler set the learning rates of other stages than those that it was made for."""
    scheduler.optimizer = _all_optimizers(stages)
    scheduler.step(0)


def _all_optimizers(stages: Mapping[int, Stage]) -> ChainedOptimizer:
    optimizers = [unit.optimizer for stage in stages.values() for unit in stage.units.values()]
    return ChainedOptimizer([inner for outer in optimizers for inner in outer.chained_optimizers])


def _make_units(
    chunks: Mapping[ChunkPlace, GPTModel],
    config: OptimizerConfig,
    groups: ProcessGroupCollection,
    shard: Shard,
) -> tuple[Tensor, dict[str, Unit]]:
    """The units of a stage, their reduced gradients being parts of one flat tensor."""
    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    buffers = {
        name: DistributedDataParallel(chunk.config, ddp_config, modules, pg_collection=groups)
        for place, chunk in chunks.items()
        for name, modules in units_of(chunk, place).items()
    }
    sizes = [buffer.buffers[0].grad_data.numel() for buffer in buffers.values()]
    first = next(iter(buffers.values())).buffers[0].grad_data
    reduced = torch.zeros(sum(sizes), dtype=first.dtype, device=first.device)
    parts = reduced.split(sizes)
    return reduced, {
        name: _make_unit(name, buffer, part, config, groups, shard)
        for (name, buffer), part in zip(buffers.items(), parts, strict=True)
    }


def _make_unit(
    name: str,
    buffer: DistributedDataParallel,
    reduced: Tensor,
    config: OptimizerConfig,
    groups: ProcessGroupCollection,
    shard: Shard,
) -> Unit:
    named = buffer.module.named_parameters()
    index = buffer.buffers[0].param_index_map
    places = {parameter: range(start, end) for parameter, (start, end, _) in index.items()}
    flat, stepped = None, buffer
    if shard.count == 1:
        pieces = whole_pieces(named, places, reduced)
    else:
        flat = flatten(places)
        pieces = pieces_of(shard, flat, named, places, reduced)
        assert pieces, f"{name} has fewer elements than there are pipelines"
        stepped = _Pieces(buffer, pieces)
    optimizer = _make_optimizer(stepped, config, groups)
    parameters = tuple(buffer.module.parameters())
    return Unit(name, buffer, optimizer, reduced, parameters, pieces, shard, flat)


class _Pieces(nn.Module):
    """What Megatron-core's optimizers ask of a model, about the pieces of a shard."""

    def __init__(self, buffer: DistributedDataParallel, pieces: Sequence[Piece]) -> None:
        super().__init__()
        self.config, self.ddp_config = buffer.config, buffer.ddp_config
        self._pieces = pieces

    def named_parameters(self, *_: Any, **__: Any) -> Iterator[tuple[str, nn.Parameter]]:
        """By the names of the parameters that they are parts of."""
        return ((piece.name, piece.part) for piece in self._pieces)


def _config(options: OptimizerOptions, dtype: torch.dtype) -> OptimizerConfig:
    return OptimizerConfig(
        optimizer="adam",
        bf16=dtype is torch.bfloat16,
        fp16=dtype is torch.float16,
        params_dtype=dtype,
        lr=options.lr,
        min_lr=options.min_lr,
        weight_decay=options.weight_decay,
        adam_beta1=options.adam_beta1,
        adam_beta2=options.adam_beta2,
        adam_eps=options.adam_eps,
        clip_grad=options.clip_grad,
    )


def _make_optimizer(
    stepped: nn.Module, config: OptimizerConfig, groups: ProcessGroupCollection
) -> ChainedOptimizer:
    made = get_megatron_optimizer(
        config,
        [stepped],
        # No decay of biases and norms: so far the default too, but upstream means to drop it.
        config_overrides=get_standard_config_overrides(config),
        pg_collection=groups,
        use_gloo_process_groups=False,
    )
    if config.fp16:
        # Each would have a scale of its own, and look for overflows in its own unit only.
        for optimizer in made.chained_optimizers:
            optimizer.grad_scaler = None
    return made


def main_parameter(parameter: nn.Parameter) -> Tensor:
    """What the optimizer steps: the float32 copy of a parameter in half precision, or itself."""
    main: Tensor = getattr(parameter, "main_param", parameter)
    return main


def _optimizer_state(unit: Unit, piece: Piece) -> Iterator[tuple[str, Tensor]]:
    main = main_parameter(piece.part)
    if main is not piece.part:
        yield _placed("main", piece, main)
    for optimizer in unit.optimizer.chained_optimizers:
        for kind, value in sorted(optimizer.optimizer.state.get(main, {}).items()):
            yield _placed(kind, piece, torch.as_tensor(value))


def _placed(kind: str, piece: Piece, value: Tensor) -> tuple[str, Tensor]:
    if value.shape != piece.part.shape:  # the number of steps
        return kind, value.detach()
    if piece.is_whole:
        return kind, value.detach().view(piece.parameter.shape)
    return f"{kind}@{piece.start}", value.detach().view(-1)
