"""What a run has saved, as the tests look at it: whole folders, a tracker, and their tensors."""

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from saved_tensors import tensors_of

TRACKER = "latest_checkpointed_iteration.txt"


def complaints(root: Path, steps: tuple[int, ...], reference: Path) -> Iterator[str]:
    """What is not as it must be: these steps whole, with the bits of another run's, no remains."""
    wanted = {f"iter_{step:07d}" for step in steps} | {TRACKER}
    if (found := set(os.listdir(root))) != wanted:
        yield f"{root} holds {sorted(found)}, not {sorted(wanted)}"
    if (tracked := (root / TRACKER).read_text()) != str(steps[-1]):
        yield f"the tracker names {tracked}, not {steps[-1]}"
    for name in sorted(wanted - {TRACKER}):
        yield from _differences(name, tensors_of(root / name), tensors_of(reference / name))


def _differences(
    name: str, saved: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]
) -> Iterator[str]:
    if saved.keys() != expected.keys():
        yield f"{name} has other tensors: {sorted(saved.keys() ^ expected.keys())}"
    for key in saved.keys() & expected.keys():
        if not torch.equal(saved[key], expected[key]):
            yield f"{name}: {key} differs"
