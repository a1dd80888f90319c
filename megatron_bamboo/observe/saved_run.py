"""What a run leaves in its job folder for comparing: saved tensors and losses.

``state/*.safetensors`` holds one file a worker, stage and role, its tensors named
``unit/parameter/kind``; ``losses.jsonl`` holds one line a step with hexadecimal floats, which keep
every bit. Tensors are opened lazily: only names and metadata are read here.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_bamboo.errors import UserError

STATE_FOLDER = "state"
LOSSES_FILE = "losses.jsonl"


@dataclass(frozen=True, slots=True)
class StateFile:
    """One worker's copy of one stage."""

    name: str
    handle: Any
    names: frozenset[str]
    step: str
    loss_scale: str

    def tensor(self, name: str) -> torch.Tensor:
        """Read one tensor."""
        tensor: torch.Tensor = self.handle.get_tensor(name)
        return tensor


@dataclass(frozen=True, slots=True)
class SavedRun:
    """The state and the losses of one finished run."""

    folder: Path
    step: str
    files: tuple[StateFile, ...]
    losses: Mapping[int, tuple[str, str]]
    """By step the loss and the gradient norm, as hexadecimal floats."""

    def holders(self) -> dict[str, list[StateFile]]:
        """For each tensor the files that hold a copy."""
        holders: dict[str, list[StateFile]] = {}
        for file in self.files:
            for name in file.names:
                holders.setdefault(name, []).append(file)
        return dict(sorted(holders.items()))


def open_run(folder: Path) -> SavedRun:
    """Open a job folder; a UserError if there is nothing whole to compare."""
    if not folder.is_dir():
        raise UserError(f"no such job folder: {folder}")
    files = tuple(_open_file(p) for p in sorted((folder / STATE_FOLDER).glob("*.safetensors")))
    if not files:
        raise UserError(f"{folder} holds no saved tensors ({STATE_FOLDER}/*.safetensors)")
    steps = {file.step for file in files}
    if len(steps) > 1:
        raise UserError(f"{folder} was saved at different steps: {', '.join(sorted(steps))}")
    return SavedRun(folder, steps.pop(), files, _read_losses(folder / LOSSES_FILE))


def _open_file(path: Path) -> StateFile:
    try:
        handle = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    metadata = handle.metadata() or {}
    if missing := {"step", "loss_scale"} - metadata.keys():
        raise UserError(f"{path} does not say its {' and '.join(sorted(missing))}")
    names = frozenset(handle.keys())
    return StateFile(path.stem, handle, names, metadata["step"], metadata["loss_scale"])


def _read_losses(path: Path) -> dict[int, tuple[str, str]]:
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    losses: dict[int, tuple[str, str]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            record = json.loads(line)
            step, values = int(record["step"]), (record["loss"], record["grad_norm"])
            for value in values:
                float.fromhex(value)
        except (ValueError, KeyError, TypeError) as error:
            raise UserError(f"{path}, line {number} is not a step's losses: {error!r}") from error
        if step in losses:
            raise UserError(f"{path} has step {step} twice")
        losses[step] = values
    return losses
