"""A stage's state under Megatron's names, to be saved, and put back in place.

What a chunk calls its tensors, and which part of a whole one each is, is Megatron-core's to say:
``sharded_state_dict`` knows the layer's global number and the tensor rank. Optimizer state goes by
the name of its parameter, so nothing in a checkpoint depends on stages, chunks, pipelines or
workers, and a run with others can go on from it.
"""

import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import make_sharded_optimizer_tensor
from megatron.core.models.gpt import GPTModel
from torch import Tensor, nn
from torch.distributed.checkpoint import CheckpointException

from megatron_bamboo.checkpoint.shares import sharded_piece
from megatron_bamboo.checkpoint.strategy import AloneLoadStrategy
from megatron_bamboo.model.optimizer_state import MOMENTS, make_moments, optimizers_of, set_step
from megatron_bamboo.model.shard import Piece
from megatron_bamboo.model.stage import Stage, main_parameter

MAIN = "fp32_param"
"""Megatron's word for the float32 copy of a parameter in half precision."""
OPTIMIZER_PREFIX = "optimizer.state."

# What reading a checkpoint that is damaged may end with; torch's own is no Exception.
LOAD_ERRORS = (
    *(OSError, RuntimeError, KeyError, ValueError, EOFError, pickle.UnpicklingError),
    *(TypeError, AttributeError, IndexError, MemoryError),
    *(CheckpointingException, CheckpointException),
)

Sharded = ShardedTensor | ShardedTensorFactory
ShardedState = dict[str, Any]
Kept = Mapping[nn.Parameter, Mapping[str, Tensor]]


def sharded_state(stages: Sequence[Stage], shares: Sequence[Stage] = ()) -> ShardedState:
    """What ``dist_checkpointing.save`` takes: parameters and moments of some stages, on the host.

    The tensors are the training's own where they are in host memory already.

    Args:
        stages: what is written of them is whole: only parameters, where moments are shared out.
        shares: of these what the optimizer has here.
    """
    for stage in (*stages, *shares):
        make_moments(stage)
    state = {
        f"stage{stage.number}.chunk{index}": _chunk_state(chunk, _whole_moments(stage))
        for stage in stages
        for index, chunk in enumerate(stage.chunks)
    }
    state |= {
        f"stage{stage.number}.chunk{index}.share": _share_state(chunk, stage)
        for stage in shares
        for index, chunk in enumerate(stage.chunks)
    }
    return _map_tensors(state, lambda tensor: tensor.detach().cpu())


def load_stage(stage: Stage, folder: str, num_applied: int) -> None:
    """Put the state of a checkpoint in place of a stage's own; this process reads alone.

    Each of a stage's tensors is read into a copy first: Megatron's names for the parts of a gated
    layer belong to no parameter of their own. Of what the pipelines share all is read, and what is
    this worker's own is kept.

    Args:
        num_applied: steps that the optimizer has taken: all but those that were skipped.
    """
    make_moments(stage)
    kept = _kept_by_optimizers(stage)
    for chunk in stage.chunks:
        own = _chunk_state(chunk, kept)
        wanted = _map_tensors(own, lambda tensor: tensor.detach().clone())
        loaded = dist_checkpointing.load(
            wanted, folder, AloneLoadStrategy(), validate_access_integrity=False
        )
        _copy_into(own, loaded)
    _take_shares(stage, kept)
    for optimizer in optimizers_of(stage):
        set_step(optimizer, num_applied)


def _chunk_state(chunk: GPTModel, kept: Kept) -> ShardedState:
    """A chunk's sharded tensors; their data are the very tensors that the training uses."""
    model = _model_state(chunk)
    optimizer: ShardedState = {}
    for name, tensor in model.items():
        if not isinstance(tensor, Sharded):
            continue
        for kind, value in kept.get(tensor.data, {}).items():
            sharded = make_sharded_optimizer_tensor(tensor, value, f"{OPTIMIZER_PREFIX}{kind}")
            optimizer.setdefault(kind, {})[name] = sharded
    return {"model": model, "optimizer": optimizer}


def _share_state(chunk: GPTModel, stage: Stage) -> ShardedState:
    """What this worker's optimizer has of a chunk."""
    pieces = {piece.parameter: (piece, tensors) for piece, tensors in _kept_of_pieces(stage)}
    share: ShardedState = {}
    for name, tensor in _model_state(chunk).items():
        if isinstance(tensor, Sharded) and tensor.data in pieces:
            piece, tensors = pieces[tensor.data]
            kept = {f"{OPTIMIZER_PREFIX}{kind}": value for kind, value in tensors.items()}
            share[name] = list(sharded_piece(tensor, piece, kept))
    return share


def _model_state(chunk: GPTModel) -> ShardedState:
    state: ShardedState = chunk.sharded_state_dict(metadata={"dp_cp_group": dist.group.WORLD})
    return state


def _whole_moments(stage: Stage) -> Kept:
    return _kept_by_optimizers(stage) if stage.shard.count == 1 else {}


def _kept_by_optimizers(stage: Stage) -> Kept:
    """By parameter the tensors of its size that its optimizer keeps, by Megatron's names.

    Where it keeps only a share of one, a tensor of the whole's size without values.
    """
    return {
        piece.parameter: {
            kind: tensor if piece.is_parameter else tensor.new_empty(piece.parameter.shape)
            for kind, tensor in tensors.items()
        }
        for piece, tensors in _kept_of_pieces(stage)
    }


def _take_shares(stage: Stage, kept: Kept) -> None:
    """Copy what is this worker's own out of the whole tensors."""
    for piece, tensors in _kept_of_pieces(stage):
        if not piece.is_parameter:
            for kind, tensor in tensors.items():
                tensor.copy_(piece.of(kept[piece.parameter][kind]))


def _kept_of_pieces(stage: Stage) -> Iterator[tuple[Piece, dict[str, Tensor]]]:
    states = {
        main: optimizer.state[main]
        for optimizer in optimizers_of(stage)
        for group in optimizer.param_groups
        for main in group["params"]
    }
    for unit in stage.units.values():
        for piece in unit.pieces:
            main = main_parameter(piece.part)
            kept = {kind: states[main][kind] for kind in MOMENTS}
            if main is not piece.part:
                kept[MAIN] = main.detach()
            yield piece, kept


def _map_tensors(state: ShardedState, change: Callable[[Tensor], Tensor]) -> ShardedState:
    """The same state with other tensors as its data."""

    def changed(value: Any) -> Any:
        if not isinstance(value, Sharded):
            return value
        return replace(value, data=change(value.data))

    mapped: ShardedState = dict_list_map_outplace(changed, state)
    return mapped


def _copy_into(own: Mapping[str, Any], loaded: Mapping[str, Any]) -> None:
    """Copy what was read for each sharded tensor into the tensor that the training uses."""
    for name, value in own.items():
        if isinstance(value, Mapping):
            _copy_into(value, loaded[name])
        elif isinstance(value, Sharded):
            with torch.no_grad():
                value.data.copy_(loaded[name])
