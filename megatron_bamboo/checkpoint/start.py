"""Where a run starts from, and whether it may save: settled before any worker exists."""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path

from megatron_bamboo.checkpoint.common import Fingerprint, check_continues
from megatron_bamboo.checkpoint.folder import (
    TRACKER,
    check_whole,
    claim,
    read_tracker,
    step_folder,
)
from megatron_bamboo.config import CheckpointOptions
from megatron_bamboo.errors import UserError


@dataclass(frozen=True, slots=True)
class Start:
    """The step that was done already, and the lines that say what was found."""

    step: int
    notes: tuple[str, ...]


def prepare_checkpoints(
    options: CheckpointOptions, args: Namespace, fingerprint: Fingerprint
) -> Start:
    """Check the checkpoint to go on from, and get the folder to save in ready.

    Args:
        args: this run's options as a checkpoint would hold them.
        fingerprint: tells the order of this run's first samples.

    Raises:
        UserError: with one line that says how to mend it.
    """
    notes: list[str] = []
    step = 0
    if options.load is not None:
        step = _find(Path(options.load), options)
        if step == 0:
            notes.append(f"--load {options.load} holds no checkpoint: training starts anew")
        else:
            check_continues(step_folder(Path(options.load), step), step, args, fingerprint)
    if options.save is not None:
        aside = claim(Path(options.save), step)
        notes += [f"no tracker names it, so it was set aside: {path}" for path in aside]
    return Start(step, tuple(notes))


def _find(root: Path, options: CheckpointOptions) -> int:
    """The step to go on from; 0 if there is none and that is allowed."""
    step = options.ckpt_step
    try:
        if step is None:
            step = read_tracker(root)
        if step is not None:
            check_whole(step_folder(root, step))
    except OSError as error:
        raise UserError(f"--load {root} cannot be read: {error.strerror}") from error
    if step is None and options.exit_on_missing_checkpoint:
        raise UserError(f"--load {root} has no {TRACKER}, and --exit-on-missing-checkpoint is set")
    if step == 0:
        raise UserError(f"{root / TRACKER} names step 0: no checkpoint is of that step")
    return step or 0
