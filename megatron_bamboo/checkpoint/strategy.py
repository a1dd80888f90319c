"""Writes and reads the data files of a checkpoint where Megatron-core's own strategies cannot.

* Its writer starts a server process and forks another one a file, which outlive a writer that is
  killed, and it hangs for ever where ``psutil`` is missing. Here its translation into torch's
  distributed checkpoints is written by torch's plain writer, in this process, without a GPU.
* Its reader, in a process that reads alone, takes the layers that it was not asked for as its own:
  they are marked by "another rank". Layers that are parts of a whole along an axis which they do
  not have themselves are given that axis first; for others no mark is needed.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace
from megatron.core.dist_checkpointing.mapping import ShardedStateDict, StateDict
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.torch import (
    MCoreSavePlanner,
    TorchDistLoadShardedStrategy,
    _replace_state_dict_keys_with_sharded_keys,
    mcore_to_pyt_state_dict,
)
from torch.distributed import checkpoint
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner

BACKEND, VERSION = "torch_dist", 1


class PlainSaveStrategy(SaveShardedStrategy):
    """The format ``torch_dist``; every writer writes one file, ``__<rank>_0.distcp``, and syncs it.

    Args:
        before_writing: called when all writers have agreed what to write.
    """

    def __init__(self, before_writing: Callable[[], None]) -> None:
        super().__init__(BACKEND, VERSION)
        self._before_writing = before_writing

    @property
    def can_handle_sharded_objects(self) -> bool:
        """Objects are written into the same files."""
        return True

    def save(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: str | Path) -> None:
        """Write what this process is the main holder of; a collective of the default group."""
        by_key, _, _ = _replace_state_dict_keys_with_sharded_keys(
            sharded_state_dict, keep_only_main_replica=True
        )
        checkpoint.save(
            mcore_to_pyt_state_dict(by_key, is_loading=False),
            storage_writer=_Writer(checkpoint_dir, self._before_writing),
            planner=MCoreSavePlanner(flatten_state_dict=False),
        )


class _Writer(FileSystemWriter):
    def __init__(self, folder: str | Path, before_writing: Callable[[], None]) -> None:
        # Copying ahead would use a CUDA stream where there is a GPU; all is in host memory already.
        super().__init__(folder, thread_count=1, per_thread_copy_ahead=0, sync_files=True)
        self._before_writing = before_writing

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        self._before_writing()
        return super().write_data(plan, planner)


class AloneLoadStrategy(TorchDistLoadShardedStrategy):
    """Reads parts of tensors in a process that reads alone; into the tensors that it is given."""

    def load(self, sharded_state_dict: ShardedStateDict, checkpoint_dir: Path) -> StateDict:
        """Read what is asked for."""
        with_axes = dict_list_map_outplace(_with_own_axes, sharded_state_dict)
        return _in_place_of(sharded_state_dict, super().load(with_axes, checkpoint_dir))


def _with_own_axes(wanted: Any) -> Any:
    """The same part of the same whole, with all of the whole's axes; its memory is shared."""
    if not isinstance(wanted, ShardedTensor) or wanted.prepend_axis_num == 0:
        return wanted
    shape = (1,) * wanted.prepend_axis_num + wanted.local_shape
    return replace(wanted, data=wanted.data.view(shape), local_shape=shape, prepend_axis_num=0)


def _in_place_of(wanted: Any, loaded: Any) -> Any:
    """What was read, in the shapes that were asked for."""
    if isinstance(wanted, dict):
        return {name: _in_place_of(value, loaded[name]) for name, value in wanted.items()}
    if isinstance(wanted, list):
        return [_in_place_of(*pair) for pair in zip(wanted, loaded, strict=True)]
    if isinstance(wanted, ShardedTensor):
        return loaded.view(wanted.local_shape)
    return loaded
