"""The tensors of a checkpoint, read by torch alone."""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner
from torch.distributed.checkpoint.state_dict_loader import _load_state_dict


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors, whole."""
    state: dict[str, Any] = {}
    _load_state_dict(
        state,
        storage_reader=FileSystemReader(folder),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    return {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
