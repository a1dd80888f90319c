"""What a run leaves in its job folder for comparing: saved tensors and losses.

``state/*.safetensors`` holds one file a worker, stage and role, its tensors named
``unit/parameter/kind``; ``losses.jsonl`` holds one line a step with hexadecimal floats, which keep
every bit, and one an evaluation. Tensors are opened lazily: only names and metadata are read here.
``job.json`` tells what a whole run leaves: two halves that agree would prove nothing.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from megatron_bamboo.agent.job import JOB_FILE, JobShape
from megatron_bamboo.errors import UserError
from megatron_bamboo.planner.arrangement import unit_names

STATE_FOLDER = "state"
LOSSES_FILE = "losses.jsonl"


@dataclass(frozen=True, slots=True)
class StateFile:
    """One worker's copy of one stage."""

    name: str
    handle: Any
    names: frozenset[str]
    stage: str
    step: str
    loss_scale: str
    """A hexadecimal float."""

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
    start_step: int = 0
    """The steps before its first one: those of the checkpoint that it went on from."""
    evaluations: Mapping[tuple[int, str], Mapping[str, str]] = field(default_factory=dict)
    """By step and kind of evaluation its losses by name, as hexadecimal floats."""


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
    shape = _read_shape(folder)
    losses, evaluations = _read_losses(folder / LOSSES_FILE)
    run = SavedRun(folder, steps.pop(), files, losses, shape.start_step, evaluations)
    _check_whole(run, shape)
    return run


def _read_shape(folder: Path) -> JobShape:
    try:
        shape = JobShape.read(folder)
    except (UserError, ValueError, RecursionError, OSError):
        shape = None
    numbers = (shape.tensor_size, shape.train_iters) if shape else (None,)
    is_whole = all(type(number) is int and number >= 1 for number in numbers)
    if shape is None or not is_whole or type(shape.start_step) is not int:
        raise UserError(
            f"{folder} holds no usable {JOB_FILE}: give the --job-dir of a finished run"
        )
    return shape


def _check_whole(run: SavedRun, shape: JobShape) -> None:
    """Refuse a run of which something is missing; one holder of each unit is enough."""
    if lack := _lack(run, shape):
        raise UserError(f"{run.folder} is not whole: {lack}; compare runs that have finished")


def _lack(run: SavedRun, shape: JobShape) -> str | None:
    first, last = shape.start_step + 1, shape.train_iters
    if run.step != str(last):
        return f"its state is of step {run.step}, its last is {last}"
    held = {unit for file in run.files for unit in _units(file, shape.tensor_size)}
    for unit in unit_names(shape.arrangement.num_units):
        for rank in range(shape.tensor_size):
            if (unit, rank) not in held:
                share = f" and tensor rank {rank}" if shape.tensor_size > 1 else ""
                return f"{STATE_FOLDER} has no file with unit {unit}{share}"
    for step in range(first, last + 1):
        if step not in run.losses:
            return f"{LOSSES_FILE} lacks step {step} of {last}"
    extra = next((step for step in run.losses if not first <= step <= last), None)
    if extra is not None:
        return f"{LOSSES_FILE} has step {extra}, but the job has steps {first} to {last}"
    return None


def _units(file: StateFile, tensor_size: int) -> set[tuple[str, int]]:
    """The units that a file holds, and the tensor ranks whose share it is."""
    heads = {tuple(name.split("/")[:2]) for name in file.names}
    if tensor_size == 1:
        return {(unit, 0) for unit, *_ in heads}
    ranks = {f"tensor{rank}": rank for rank in range(tensor_size)}
    return {(unit, ranks[first]) for first, unit in heads if first in ranks}


def _open_file(path: Path) -> StateFile:
    try:
        handle = safe_open(path, framework="pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    metadata = handle.metadata() or {}
    if missing := {"stage", "step", "loss_scale"} - metadata.keys():
        raise UserError(f"{path} does not say its {' and '.join(sorted(missing))}")
    scale = metadata["loss_scale"]
    if not _is_number(scale):
        raise UserError(f"{path} has the loss scale {scale!r}, which is no number: run again")
    names = frozenset(handle.keys())
    return StateFile(path.stem, handle, names, metadata["stage"], metadata["step"], scale)


def _is_number(text: str) -> bool:
    try:
        return math.isfinite(float.fromhex(text))
    except (ValueError, OverflowError):
        return False


def _read_losses(
    path: Path,
) -> tuple[dict[int, tuple[str, str]], dict[tuple[int, str], dict[str, str]]]:
    """Those of steps, and those of evaluations."""
    if not path.is_file():
        raise UserError(f"no such file: {path}")
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}; give a finished run's folder") from error
    losses: dict[int, tuple[str, str]] = {}
    again: dict[object, int] = {}
    evaluations: dict[tuple[int, str], dict[str, str]] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise TypeError("it is no object")
            times = _times(record)
            if "evaluated" in record:
                key, found = _parse_evaluation(record)
                if key in evaluations and times <= again[key]:
                    raise ValueError(f"the {key[1]} evaluation of step {key[0]} is there twice")
                evaluations[key], again[key] = found, times
                continue
            step, values = _parse_losses(record)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise UserError(f"{path}, line {number} is not a step's losses: {error!r}") from error
        # What was undone, since all went back to a checkpoint, was done again after that.
        if step in losses and times <= again[step]:
            raise UserError(f"{path} has step {step} twice")
        losses[step], again[step] = values, times
    return losses, evaluations


def _times(record: Mapping[str, Any]) -> int:
    """After how many returns to checkpoints it was done again; 0 for the first time."""
    again = record.get("again", 0)
    if type(again) is not int:
        raise ValueError(f"its number of times is {again!r}")
    return again


def _parse_evaluation(record: Mapping[str, Any]) -> tuple[tuple[int, str], dict[str, str]]:
    """The step and the kind of an evaluation, and its losses."""
    step, losses = record["step"], dict(record["losses"])
    if type(step) is not int:
        raise ValueError(f"its step is {step!r}")
    for value in losses.values():
        float.fromhex(value)
    return (step, record["evaluated"]), losses


def _parse_losses(record: Mapping[str, Any]) -> tuple[int, tuple[str, str]]:
    step, values = record["step"], (record["loss"], record["grad_norm"])
    if type(step) is not int:
        raise ValueError(f"its step is {step!r}")
    for value in values:
        float.fromhex(value)
    return step, values
