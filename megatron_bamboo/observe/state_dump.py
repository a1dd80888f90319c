"""Writes what a worker holds at the end of a run, for ``bamboo compare``.

One file for each stage held, as primary or as replica: parameters and optimizer state by
``unit/parameter/kind``. It is for comparing, not for going on; going on is a checkpoint's business.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

STATE_FOLDER = "state"


def dump_stage(
    job_dir: Path,
    node: str,
    pipeline: int,
    stage: int,
    role: str,
    step: int,
    loss_scale: float,
    state: Iterable[tuple[str, Tensor]],
) -> None:
    """Write one stage's state; a file under its final name is whole.

    Args:
        role: ``primary`` or ``replica``.
        step: the last step that was done.
        loss_scale: that of the next step; 1 where there is none.
    """
    folder = job_dir / STATE_FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{node}-stage{stage}-{role}.safetensors"
    metadata = {
        "pipeline": str(pipeline),
        "stage": str(stage),
        "role": role,
        "step": str(step),
        "loss_scale": loss_scale.hex(),
    }
    scratch = path.with_suffix(".partial")
    save_file({name: tensor.contiguous() for name, tensor in state}, scratch, metadata=metadata)
    os.replace(scratch, path)
