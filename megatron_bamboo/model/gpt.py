"""A chunk of a GPT, for any range of layers on any worker.

The chunk is Megatron-core's own ``GPTModel`` on its own layer specs, built from process groups of
one member instead of global parallel state: which stage a chunk belongs to is an argument, so that
one worker can hold its own stage and the replica of its successor's. Weights are drawn here and
not by Megatron, whose draws depend on what was built before.
"""

import importlib.util
from dataclasses import dataclass

import torch
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_bamboo.config import Layout, ModelOptions, ParallelOptions
from megatron_bamboo.errors import UserError
from megatron_bamboo.model.local_norm import LocalNorm
from megatron_bamboo.model.randomness import DropoutSeeds, derive_seed

# Parameters whose initial values Megatron scales by 1/sqrt(2 x layers).
_RESIDUAL_OUTPUTS = ("linear_proj.weight", "linear_fc2.weight")


@dataclass(frozen=True, slots=True)
class ChunkPlace:
    """Where a chunk stands in the model: its layers, and whether it begins or ends the model."""

    layers: range  # global numbers, from 0
    is_first: bool
    is_last: bool


def places_of_stage(stage: int, layout: Layout, num_layers: int) -> tuple[ChunkPlace, ...]:
    """The chunks of one stage when the layers are cut into equal parts.

    Chunk c of stage s is virtual stage c * stages + s, as in Megatron's interleaving.
    """
    num_virtual = layout.num_stages * layout.num_chunks
    per_chunk = num_layers // num_virtual
    virtual_stages = range(stage, num_virtual, layout.num_stages)
    return tuple(
        ChunkPlace(range(v * per_chunk, (v + 1) * per_chunk), v == 0, v == num_virtual - 1)
        for v in virtual_stages
    )


def transformer_config(options: ModelOptions, parallel: ParallelOptions) -> TransformerConfig:
    """Megatron's configuration of one worker's layers.

    The pipeline size is 1 here: stages are this project's, Megatron sees a model part.
    """
    on_gpu = torch.cuda.is_available()
    return TransformerConfig(
        num_layers=options.num_layers,
        hidden_size=options.hidden_size,
        num_attention_heads=options.num_attention_heads,
        ffn_hidden_size=options.feed_forward_size,
        attention_dropout=options.attention_dropout,
        hidden_dropout=options.hidden_dropout,
        normalization=options.normalization,
        layernorm_epsilon=options.norm_epsilon,
        gated_linear_unit=options.swiglu,
        activation_func=nn.functional.silu if options.swiglu else nn.functional.gelu,
        add_bias_linear=not options.disable_bias_linear,
        init_method_std=options.init_method_std,
        use_cpu_initialization=not on_gpu,
        pipeline_dtype=torch.float32,
        recompute_granularity=options.recompute_granularity,
        recompute_method=options.recompute_method,
        recompute_num_layers=options.recompute_num_layers,
        tensor_model_parallel_size=parallel.tensor_model_parallel_size,
        sequence_parallel=parallel.sequence_parallel,
        # Fusions are CUDA kernels; an output that is being sent must not be freed early.
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        gradient_accumulation_fusion=False,
        apply_rope_fusion=False,
        deallocate_pipeline_outputs=False,
        # None at all; the default is a deprecated word for it, with a warning in each worker's log.
        cuda_graph_scope=[],
    )


def prepare_process(tensor_group: ProcessGroup) -> None:
    """The little that Megatron's layers still read from global state; once a process."""
    if parallel_state._GLOBAL_MEMORY_BUFFER is None:
        parallel_state._set_global_memory_buffer()
    parallel_state._TENSOR_MODEL_PARALLEL_GROUP = tensor_group
    parallel_state.set_tensor_model_parallel_world_size(tensor_group.size())
    parallel_state.set_tensor_model_parallel_rank(tensor_group.rank())


def build_chunk(
    options: ModelOptions,
    parallel: ParallelOptions,
    place: ChunkPlace,
    vocab_size: int,
    seed: int,
    groups: ProcessGroupCollection,
    dropout: DropoutSeeds,
) -> GPTModel:
    """Build one chunk, with the initial weights of (seed, unit, parameter) and of nothing else.

    Args:
        vocab_size: padded size of the vocabulary.
        groups: the workers that share these layers, and otherwise groups of one member.
        dropout: reseeds the generators before each unit's forward pass.
    """
    config = transformer_config(options, parallel)
    # On a GPU the module is made there; on a CPU the factories of model/cpu.py answer.
    chunk = GPTModel(
        config=config,
        transformer_layer_spec=_block_spec(options, config, place),
        vocab_size=vocab_size,
        max_sequence_length=options.max_position_embeddings,
        pre_process=place.is_first,
        post_process=place.is_last,
        share_embeddings_and_output_weights=not options.untie_embeddings_and_output_weights,
        position_embedding_type=options.position_embedding_type,
        pg_collection=groups,
    )
    if torch.cuda.is_available():
        chunk.cuda()
    for number, layer in zip(place.layers, chunk.decoder.layers, strict=True):
        layer.layer_number = number + 1
    shared = _shared_weight(chunk)
    for unit, parts in units_of(chunk, place).items():
        _initialize(unit, parts, shared, config, seed, groups.tp)
    _attach_dropout(chunk, place, dropout)
    return chunk


def units_of(chunk: GPTModel, place: ChunkPlace) -> dict[str, nn.ModuleDict]:
    """The units of a chunk by name, each a dictionary of its modules.

    A tied head holds a copy of the embedding's weight: one weight in two roles (see
    ``docs/design.md``). When one chunk is the whole model, the head has none.
    """
    units: dict[str, nn.ModuleDict] = {}
    if place.is_first:
        units["embedding"] = nn.ModuleDict({"embedding": chunk.embedding})
    for number, layer in zip(place.layers, chunk.decoder.layers, strict=True):
        units[f"layer{number}"] = nn.ModuleDict({"layer": layer})
    if place.is_last:
        units["head"] = nn.ModuleDict(
            {"final_layernorm": chunk.decoder.final_layernorm, "output_layer": chunk.output_layer}
        )
    return units


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


def _block_spec(
    options: ModelOptions, config: TransformerConfig, place: ChunkPlace
) -> TransformerBlockSubmodules:
    if uses_transformer_engine(options):
        from megatron.core.extensions.transformer_engine import TENorm

        spec, norm = get_gpt_layer_with_transformer_engine_spec(), TENorm
    else:
        spec, norm = get_gpt_layer_local_spec(normalization=options.normalization), LocalNorm
        spec.submodules.input_layernorm = LocalNorm
        spec.submodules.pre_mlp_layernorm = LocalNorm
    return TransformerBlockSubmodules(layer_specs=[spec] * len(place.layers), layer_norm=norm)


def uses_transformer_engine(options: ModelOptions) -> bool:
    """Whether the layers are Transformer Engine's: where it is installed, unless told otherwise."""
    if options.transformer_impl == "local" or not torch.cuda.is_available():
        return False
    installed = importlib.util.find_spec("transformer_engine") is not None
    if options.transformer_impl == "transformer_engine" and not installed:
        raise UserError("--transformer-impl transformer_engine: it is not installed")
    return installed


def _initialize(
    unit: str,
    parts: nn.ModuleDict,
    shared: nn.Parameter | None,
    config: TransformerConfig,
    seed: int,
    tensor_group: ProcessGroup,
) -> None:
    for name, parameter in parts.named_parameters():
        if parameter.dim() < 2:
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
    # With sequence parallelism a block turns to the tracker's generator before its first layer.
    dropout.attach("block", chunk.decoder)
    for unit, parts in units_of(chunk, place).items():
        if unit != "head":  # the head has no dropout
            (module,) = parts.values()
            dropout.attach(unit, module)
