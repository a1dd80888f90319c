"""The part of a checkpoint that is not tensors: which step it is of, and under which options.

It has Megatron's form: ``iteration``, ``checkpoint_version``, ``args`` and the scheduler's state.
From ``args`` a run sees whether it may go on from a checkpoint: the model must be the same, and so
must what decides which samples come next (invariant 1).
"""

import pickle
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_bamboo.checkpoint.state import OPTIMIZER_PREFIX
from megatron_bamboo.errors import UserError

Fingerprint = Callable[[int], str]
"""From a number of samples to what tells their order (see ``data/fingerprint.py``)."""

CHECKPOINT_VERSION = 3.0
"""Megatron's number for how it orders the rows of attention's weights today."""

# By name in ``args``, the flag that must agree. The order is that of checking.
_MODEL = {
    "num_layers": "--num-layers",
    "hidden_size": "--hidden-size",
    "num_attention_heads": "--num-attention-heads",
    "swiglu": "--swiglu",
    "ffn_hidden_size": "--ffn-hidden-size",
    "max_position_embeddings": "--max-position-embeddings",
    "position_embedding_type": "--position-embedding-type",
    "untie_embeddings_and_output_weights": "--untie-embeddings-and-output-weights",
    "normalization": "--normalization",
    "norm_epsilon": "--norm-epsilon",
    "add_bias_linear": "--disable-bias-linear",
    "bf16": "--bf16",
    "fp16": "--fp16",
}
# What reading a damaged file may end with.
_UNPICKLING_ERRORS = (
    *(RuntimeError, pickle.UnpicklingError, EOFError, ValueError, TypeError, MemoryError),
    *(KeyError, IndexError, AttributeError, ImportError),
)
_SAMPLES = {"seed": "--seed", "seq_length": "--seq-length", "split": "--split"}


def plain_args(args: Namespace) -> Namespace:
    """A run's options as a checkpoint holds them: plain values, which anyone can read back."""
    values = {name: value for name, value in vars(args).items() if _is_plain(value)}
    return Namespace(**values, add_bias_linear=not args.disable_bias_linear)


def common_state(
    args: Namespace,
    step: int,
    scheduler: dict[str, Any],
    loss_scale: list[float],
    fingerprint: Fingerprint,
) -> dict[str, Any]:
    """What all writers agree on and the lead writes.

    Args:
        scheduler: its state; it has not moved in steps that were skipped.
        loss_scale: what decides the scales to come, nothing where none is used.
        fingerprint: tells the order of the first samples.
    """
    applied = scheduler["num_steps"] // args.global_batch_size
    consumed = step * args.global_batch_size
    samples = {"iteration": step, "consumed_train_samples": consumed}
    return {
        "iteration": step,
        "checkpoint_version": CHECKPOINT_VERSION,
        "args": Namespace(**vars(args) | samples),
        "opt_param_scheduler": scheduler,
        "samples_fingerprint": fingerprint(consumed),
        "optimizer": {"state": {"common_step": applied}, "loss_scale": loss_scale},
    }


@dataclass(frozen=True, slots=True)
class Counters:
    """What a checkpoint says of the steps before it beside their number."""

    num_applied: int
    """Steps that were not skipped."""
    loss_scale: tuple[float, ...]


def read_counters(folder: Path) -> Counters:
    """The counters of a checkpoint that ``check_continues`` has found good."""
    optimizer = _read_common(folder)["optimizer"]
    return Counters(optimizer["state"]["common_step"], tuple(optimizer["loss_scale"]))


def check_continues(folder: Path, step: int, args: Namespace, fingerprint: Fingerprint) -> None:
    """Check that a run with these options may go on from a checkpoint.

    Args:
        fingerprint: tells the order of this run's first samples.

    Raises:
        UserError: it is damaged, is not of that step, or of another model or order of samples.
    """
    _check_files(folder)
    common = _read_common(folder)
    saved = common.get("args")
    if not isinstance(saved, Namespace) or common.get("iteration") != step:
        raise UserError(f"{folder} is not a checkpoint of step {step}: name another step")
    for name, flag in (_MODEL | _SAMPLES).items():
        was, now = getattr(saved, name, None), getattr(args, name)
        if was is not None and was != now:
            raise UserError(f"{flag}: {folder} was saved with {name} {was}, not {now}: give {was}")
    _check_vocabulary(folder, saved, args)
    _check_samples(folder, step, saved, args)
    if common.get("samples_fingerprint") != fingerprint(step * args.global_batch_size):
        raise UserError(
            f"{folder} has seen other samples, or in another order, than this run would have: give "
            "the same --data-path, and with data that are gone through more than once the same "
            "--train-iters"
        )


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def _check_vocabulary(folder: Path, saved: Namespace, args: Namespace) -> None:
    was, now = getattr(saved, "padded_vocab_size", None), args.padded_vocab_size
    if was not in (None, now):
        raise UserError(
            f"{folder} has a vocabulary padded to {was}, this run one of {now}: give the same "
            "--vocab-file, and a --make-vocab-size-divisible-by that pads it to as much"
        )


def _check_samples(folder: Path, step: int, saved: Namespace, args: Namespace) -> None:
    consumed, batch = getattr(saved, "consumed_train_samples", None), args.global_batch_size
    if consumed != step * batch:
        raise UserError(
            f"--global-batch-size {batch}: {folder} has seen {consumed} samples in {step} steps, "
            f"so that samples would come twice or never: give {(consumed or 0) // step}"
        )


def _read_common(folder: Path) -> dict[str, Any]:
    path = folder / "common.pt"
    try:
        common = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, *_UNPICKLING_ERRORS) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UserError(f"{path} cannot be read ({reason}): name another step") from error
    if not isinstance(common, dict):
        raise UserError(f"{path} holds no checkpoint's state: name another step")
    return common


def _check_files(folder: Path) -> None:
    """Whether all bytes that ``.metadata`` names are there, and optimizer state among them."""
    metadata = _read_metadata(folder)
    for place in metadata.storage_data.values():
        path = folder / place.relative_path
        size = path.stat().st_size if path.is_file() else -1
        if size < place.offset + place.length:
            state = "is missing" if size < 0 else f"ends after {size} bytes"
            raise UserError(f"{path} {state}: the checkpoint is damaged; name another step")
    if not any(name.startswith(OPTIMIZER_PREFIX) for name in metadata.state_dict_metadata):
        raise UserError(
            f"{folder} holds no optimizer state that can be used here: only checkpoints that "
            "megatron_bamboo has written can be gone on from"
        )


def _read_metadata(folder: Path) -> Any:
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except (OSError, *_UNPICKLING_ERRORS) as error:
        raise UserError(
            f"{folder / '.metadata'} cannot be read: the checkpoint is damaged; name another step"
        ) from error
    return metadata
