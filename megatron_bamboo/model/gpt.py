"""A chunk of a GPT, for any range of layers on any worker, from a script's own model provider.

The provider builds Megatron-core's ``GPTModel``, or a class derived from it, out of process groups
of one member instead of global parallel state: which stage a chunk belongs to is an argument, so
that one worker can hold its own stage and the replica of its successor's. Weights are drawn here
and not by Megatron, whose draws depend on what was built before.
"""

import inspect
from dataclasses import dataclass
from typing import Any, Self

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_bamboo.config import Options
from megatron_bamboo.errors import UserError
from megatron_bamboo.model.config import building
from megatron_bamboo.model.precision import LossScale, cast_ends
from megatron_bamboo.model.randomness import DropoutSeeds, derive_seed
from megatron_bamboo.planner.arrangement import PipelineShape
from megatron_bamboo.script.args import dtype_of
from megatron_bamboo.script.providers import ModelProvider

# Parameters whose initial values Megatron scales by 1/sqrt(2 x layers).
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")
# What every GPT has, and what units call it; all else belongs to the script's own class.
_PARTS = ("embedding", "decoder", "output_layer", "rotary_pos_emb")
_NAMES_IN_UNITS = ("embedding", "layer", "final_layernorm", "output_layer")


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk stands in the model: its layers, and whether it begins or ends the model."""

    layers: range  # global numbers, from 0
    is_first: bool
    is_last: bool


@dataclass(frozen=True, slots=True)
class Recipe:
    """What every chunk of a model is built from."""

    provider: ModelProvider
    num_layers: int
    """Of the whole model."""
    is_tied: bool
    """Whether the head's weight is the embedding's."""
    seed: int
    groups: ProcessGroupCollection
    """The workers that share layers, and otherwise groups of one member."""
    dropout: DropoutSeeds
    """Reseeds the generators before each unit's forward pass."""
    dtype: torch.dtype
    """Of parameters and activations."""
    loss_scale: LossScale

    @classmethod
    def of(
        cls,
        options: Options,
        provider: ModelProvider,
        groups: ProcessGroupCollection,
        dropout: DropoutSeeds,
    ) -> Self:
        """As the options of a run say."""
        return cls(
            provider=provider,
            num_layers=options.model.num_layers,
            is_tied=not options.model.untie_embeddings_and_output_weights,
            seed=options.training.seed,
            groups=groups,
            dropout=dropout,
            dtype=dtype_of(options.precision),
            loss_scale=LossScale(options.precision),
        )


def places_of_stage(stage: int, shape: PipelineShape) -> tuple[ChunkPlace, ...]:
    """The chunks of one stage of a pipeline."""
    last = shape.num_units - 1
    return tuple(
        # The embedding is unit 0, and the head comes after the layers.
        ChunkPlace(range(max(first, 1) - 1, min(past, last) - 1), first == 0, past > last)
        for first, past in shape.spans_of(stage)
    )


def prepare_process(groups: ProcessGroupCollection) -> None:
    """What Megatron's layers and scripts still read from global state; once a process."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    for name, members in _GLOBAL_GROUPS.items():
        setattr(parallel_state, name, getattr(groups, members))
    parallel_state.set_tensor_model_parallel_world_size(groups.tp.size())
    parallel_state.set_tensor_model_parallel_rank(groups.tp.rank())


_GLOBAL_GROUPS = {
    "_TENSOR_MODEL_PARALLEL_GROUP": "tp",
    "_PIPELINE_MODEL_PARALLEL_GROUP": "pp",
    "_MODEL_PARALLEL_GROUP": "mp",
    "_CONTEXT_PARALLEL_GROUP": "cp",
    "_TENSOR_AND_CONTEXT_PARALLEL_GROUP": "tp_cp",
    "_EMBEDDING_GROUP": "embd",
    "_POSITION_EMBEDDING_GROUP": "pos_embd",
    "_DATA_PARALLEL_GROUP": "dp",
    "_DATA_PARALLEL_GROUP_WITH_CP": "dp_cp",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP": "intra_dp_cp",
    "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP": "tp_dp_cp",
    "_EXPERT_MODEL_PARALLEL_GROUP": "ep",
    "_EXPERT_TENSOR_PARALLEL_GROUP": "expt_tp",
    "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP": "tp_ep",
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP": "tp_ep_pp",
    "_EXPERT_DATA_PARALLEL_GROUP": "expt_dp",
    "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP": "intra_expt_dp",
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP": "intra_dist_opt",
}


def build_chunk(recipe: Recipe, place: ChunkPlace, draws: bool = True) -> GPTModel:
    """Build one chunk, with the initial weights of (seed, unit, parameter) and of nothing else.

    Args:
        draws: False where its state is to come: then weights are whatever is in their memory.

    Raises:
        UserError: the provider built something that cannot be a chunk of a GPT here.
    """
    chunk = _call_provider(recipe, place, draws)
    # Until here the configuration said how many layers to build.
    chunk.config.num_layers = recipe.num_layers
    if torch.cuda.is_available():
        chunk.cuda()
    _cast(chunk, recipe.dtype)
    cast_ends(chunk, recipe.dtype, place.is_first, place.is_last)
    if recipe.loss_scale.is_used:
        chunk.config.grad_scale_func = recipe.loss_scale.scale
    for number, layer in zip(place.layers, chunk.decoder.layers, strict=True):
        layer.layer_number = number + 1
    shared = _shared_weight(chunk)
    for unit, parts in units_of(chunk, place).items() if draws else ():
        _initialize(unit, parts, shared, chunk.config, recipe.seed, recipe.groups.tp)
    _attach_dropout(chunk, place, recipe.dropout)
    return chunk


def _cast(chunk: GPTModel, dtype: torch.dtype) -> None:
    """As ``chunk.to(dtype)``, which cannot replace tensors that have shapes and no elements."""
    for tensor in (*chunk.parameters(), *chunk.buffers()):
        if tensor.is_floating_point():
            tensor.data = tensor.data.to(dtype)


def _call_provider(recipe: Recipe, place: ChunkPlace, draws: bool) -> GPTModel:
    arguments: dict[str, Any] = {"pre_process": place.is_first, "post_process": place.is_last}
    parameters = inspect.signature(recipe.provider).parameters
    if "pg_collection" in parameters:
        arguments["pg_collection"] = recipe.groups
    if "vp_stage" in parameters and parameters["vp_stage"].default is inspect.Parameter.empty:
        arguments["vp_stage"] = None
    # What a provider draws by itself must not depend on what was built before either.
    torch.manual_seed(derive_seed(recipe.seed, "provider", place.layers.start))
    with building(len(place.layers), draws):
        chunk = recipe.provider(**arguments)
    if not isinstance(chunk, GPTModel):
        raise UserError(
            f"the model provider gave a {type(chunk).__name__}: it must give Megatron-core's "
            "GPTModel or a class derived from it"
        )
    if len(chunk.decoder.layers) != len(place.layers):
        raise UserError(
            f"the model provider built {len(chunk.decoder.layers)} layers for a chunk of "
            f"{len(place.layers)}: make its configuration with core_transformer_config_from_args()"
        )
    if chunk.share_embeddings_and_output_weights != recipe.is_tied:
        raise UserError(
            "the model provider must set share_embeddings_and_output_weights as "
            "--untie-embeddings-and-output-weights says"
        )
    if chunk.config.calculate_per_token_loss:
        raise UserError("calculate_per_token_loss is not supported: each microbatch counts alike")
    if chunk.config.sequence_parallel and recipe.groups.tp.size() == 1:
        raise UserError("sequence_parallel needs --tensor-model-parallel-size 2 or more")
    return chunk


def units_of(chunk: GPTModel, place: ChunkPlace) -> dict[str, nn.ModuleDict]:
    """The units of a chunk by name, each a dictionary of its modules.

    A tied head holds a copy of the embedding's weight: one weight in two roles (see
    ``docs/design.md``). When one chunk is the whole model, the head has none. Modules that a
    script's own class adds belong to the head, or to the embedding where there is no head.
    """
    extras = {n: part for n, part in chunk.named_children() if n not in _PARTS}
    units: dict[str, nn.ModuleDict] = {}
    if place.is_first:
        added = {} if place.is_last else extras
        units["embedding"] = nn.ModuleDict({"embedding": chunk.embedding, **added})
    for number, layer in zip(place.layers, chunk.decoder.layers, strict=True):
        units[f"layer{number}"] = nn.ModuleDict({"layer": layer})
    if place.is_last:
        last = {"final_layernorm": chunk.decoder.final_layernorm}
        units["head"] = nn.ModuleDict({**last, "output_layer": chunk.output_layer, **extras})
    _check_units(chunk, units)
    return units


def _check_units(chunk: GPTModel, units: dict[str, nn.ModuleDict]) -> None:
    """UserError where something would never be reduced, stepped or replicated."""
    held = {id(parameter) for parts in units.values() for parameter in parts.parameters()}
    for name, _buffer in chunk.named_buffers():
        if name.partition(".")[0] not in _PARTS:
            raise UserError(f"the model's buffer {name} would be kept by no replica: do without it")
    for name, parameter in chunk.named_parameters():
        if not parameter.requires_grad:
            raise UserError(f"the model's parameter {name} is frozen: that is not supported")
        if id(parameter) not in held:
            raise UserError(
                f"the model's parameter {name} is neither in a layer nor in a module of its first "
                "or last chunk: no unit would hold it"
            )


def tied_weight(chunk: GPTModel, place: ChunkPlace) -> nn.Parameter | None:
    """The chunk's copy of a weight that another chunk holds too, or None."""
    return None if place.is_first == place.is_last else _shared_weight(chunk)


def _shared_weight(chunk: GPTModel) -> nn.Parameter | None:
    """The weight that the embedding and the head share, where this chunk has one of them."""
    if not chunk.share_embeddings_and_output_weights:
        return None
    weight = chunk.shared_embedding_or_output_weight()
    assert weight is None or isinstance(weight, nn.Parameter)
    return weight


def _initialize(
    unit: str,
    parts: nn.ModuleDict,
    shared: nn.Parameter | None,
    config: TransformerConfig,
    seed: int,
    tensor_group: ProcessGroup,
) -> None:
    drawn = _reset_added_modules(unit, parts, seed)
    for name, parameter in parts.named_parameters():
        if parameter.dim() < 2 or id(parameter) in drawn:
            continue  # biases are zeros and norms ones already
        # Both copies of a tied weight are one draw, and so is the one copy of an uncut model.
        purpose = ("tied", "weight") if parameter is shared else (unit, name)
        torch.manual_seed(derive_seed(seed, *purpose))
        is_output = name.endswith(_RESIDUAL_OUTPUTS)
        method = config.output_layer_init_method if is_output else config.init_method
        with torch.no_grad():
            whole = torch.empty(_whole_shape(parameter, tensor_group.size()), device="cpu")
            method(whole)
            parameter.copy_(_own_part(whole, parameter, tensor_group))


def _reset_added_modules(unit: str, parts: nn.ModuleDict, seed: int) -> set[int]:
    """Draw torch's modules that a script has added by their own rule; the parameters drawn."""
    drawn: set[int] = set()
    for name, module in parts.named_modules():
        if name.partition(".")[0] in _NAMES_IN_UNITS or not hasattr(module, "reset_parameters"):
            continue
        torch.manual_seed(derive_seed(seed, unit, name))
        module.reset_parameters()
        drawn |= {id(parameter) for parameter in module.parameters(recurse=False)}
    return drawn


def _whole_shape(parameter: nn.Parameter, tensor_size: int) -> list[int]:
    """The shape of a weight over all workers that share it."""
    shape = list(parameter.shape)
    if getattr(parameter, "tensor_model_parallel", False):
        shape[parameter.partition_dim] *= tensor_size
    return shape


def _own_part(whole: Tensor, parameter: nn.Parameter, tensor_group: ProcessGroup) -> Tensor:
    """This worker's part of a weight, cut as Megatron-core's ``_initialize_affine_weight_cpu``."""
    if not getattr(parameter, "tensor_model_parallel", False):
        return whole
    dim, stride = parameter.partition_dim, parameter.partition_stride
    pieces = whole.split(parameter.shape[dim] // stride, dim=dim)
    return torch.cat(pieces[tensor_group.rank() :: tensor_group.size()], dim=dim)


def _attach_dropout(chunk: GPTModel, place: ChunkPlace, dropout: DropoutSeeds) -> None:
    if chunk.config.sequence_parallel:
        # Then a block turns to the tracker's generator before its first layer.
        dropout.attach("block", chunk.decoder)
    for unit, parts in units_of(chunk, place).items():
        for name, module in parts.items():
            if name in ("embedding", "layer"):
                dropout.attach(unit, module)
            elif name not in _NAMES_IN_UNITS:
                dropout.attach(f"{unit}/{name}", module)
