"""The folder of checkpoints: Megatron's layout, and the order of writes that never loses one.

``DIR/iter_0000010/`` is the checkpoint of step 10, and ``DIR/latest_checkpointed_iteration.txt``,
the tracker, holds ``10``. A checkpoint is written under another name, synced and renamed; only then
the tracker is replaced, by a rename as well. So at every moment, whatever dies, a folder with a
final name is whole and the tracker names one (invariant 9).

Several attempts may publish the same step: the writers of an epoch that has ended are killed, but
one may have come far, or live on unseen for a while. It does no harm. Nobody goes on to the next
step before this one is published, so all attempts write the same state; whoever renames second
finds the name taken by an equal folder and drops its own; the tracker never goes back. Whatever
else could be in the way is set aside before any worker exists.
"""

import os
import re
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from megatron_bamboo.checkpoint.moments import SaveMoment
from megatron_bamboo.errors import UserError

TRACKER = "latest_checkpointed_iteration.txt"
PARTS = ("metadata.json", "common.pt", ".metadata")
"""What every checkpoint has, besides the data files that ``.metadata`` names."""

_PARTIAL = ".partial-"
_FINAL_NAME = re.compile(r"iter_([0-9]{7,})")
_PARTIAL_NAME = re.compile(rf"(iter_[0-9]{{7,}}|{re.escape(TRACKER)}){re.escape(_PARTIAL)}.*")
_LONGEST_TRACKER = 64


def step_folder(root: Path, step: int) -> Path:
    """Where the checkpoint of a step is."""
    return root / f"iter_{step:07d}"


def saved_steps(root: Path) -> list[int]:
    """The steps whose folders are there, whole or not, in order."""
    found = [_FINAL_NAME.fullmatch(name) for name in (os.listdir(root) if root.is_dir() else ())]
    return sorted(int(match[1]) for match in found if match)


def read_tracker(root: Path) -> int | None:
    """The step that the tracker names; None if there is no tracker.

    Raises:
        UserError: it does not hold a step.
    """
    path = root / TRACKER
    try:
        with path.open("rb") as file:
            content = file.read(_LONGEST_TRACKER)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if not re.fullmatch(rb"\s*[0-9]{1,18}\s*", content):
        raise UserError(
            f"{path} does not hold the number of a step but {_shown(content)}: write the newest "
            f"whole one into it ({_choices(root)})"
        )
    return int(content)


def check_whole(folder: Path) -> None:
    """UserError if a checkpoint lacks one of its parts."""
    for name in ("", *PARTS):
        if not (folder / name).exists():
            what = f"there is no {folder}" if not name else f"{folder} has no {name}"
            raise UserError(
                f"{what}: name another step with --ckpt-step, or in "
                f"{folder.parent / TRACKER} ({_choices(folder.parent)})"
            )


def claim(root: Path, start_step: int) -> list[Path]:
    """Make the folder ready for a run that starts from a step; what was set aside, by new name.

    A folder that the tracker does not name and that this run may come to write is left from a save
    that did not end, or from a user who went back: it keeps its content under another name.

    Raises:
        UserError: the folder cannot be used, or its tracker names a step that this run would
            overwrite.
    """
    newest = read_tracker(root)
    if newest is not None and newest > start_step:
        raise UserError(
            f"--save {root} holds step {newest}, but this run starts from step {start_step} and "
            "would write over it: --load the same folder without --ckpt-step, or --save to another"
        )
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f"{TRACKER}{_PARTIAL}{uuid.uuid4().hex}"
        probe.touch()
        probe.unlink()
        newer = [step for step in saved_steps(root) if step > start_step]
        return [_set_aside(step_folder(root, step)) for step in newer]
    except OSError as error:
        raise UserError(f"--save {root} cannot be written to: {error.strerror}") from error


def make_partial(root: Path, step: int, epoch: int) -> Path:
    """A new folder to write a checkpoint into; what earlier attempts left is removed.

    A late writer of an earlier attempt finds its folder gone, and fails alone.
    """
    root.mkdir(parents=True, exist_ok=True)
    for name in os.listdir(root):
        if _PARTIAL_NAME.fullmatch(name):
            remove(root / name)
    folder = step_folder(root, step)
    partial = folder.with_name(f"{folder.name}{_PARTIAL}epoch{epoch}-{uuid.uuid4().hex[:8]}")
    partial.mkdir()
    return partial


def publish(partial: Path, root: Path, step: int, before: Callable[[SaveMoment], None]) -> None:
    """Give a written checkpoint its final name, and let the tracker name it."""
    before(SaveMoment.SYNC)
    for path in partial.iterdir():
        _sync(path)
    _sync(partial)
    before(SaveMoment.RENAME)
    final = step_folder(root, step)
    try:
        os.rename(partial, final)
    except OSError:
        if not final.is_dir():
            raise
        remove(partial)  # an earlier attempt came so far
    _sync(root)
    before(SaveMoment.TRACK)
    newest = read_tracker(root)
    if newest is None or newest < step:
        _replace_tracker(root, step)
    before(SaveMoment.END)


def _replace_tracker(root: Path, step: int) -> None:
    scratch = root / f"{TRACKER}{_PARTIAL}{uuid.uuid4().hex}"
    scratch.write_text(str(step))
    _sync(scratch)
    os.rename(scratch, root / TRACKER)
    _sync(root)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _set_aside(folder: Path) -> Path:
    target = next(name for name in _aside_names(folder) if not name.exists())
    os.rename(folder, target)
    return target


def _aside_names(folder: Path) -> Iterator[Path]:
    number = 1
    while True:
        yield folder.with_name(f"{folder.name}.unpublished-{number}")
        number += 1


def remove(path: Path) -> None:
    """Remove what nobody reads any more; a file that appears meanwhile is left to the next save."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _choices(root: Path) -> str:
    steps = saved_steps(root)
    return f"there are {', '.join(map(str, steps))}" if steps else "there is none"


def _shown(content: bytes) -> str:
    return repr(content.decode(errors="replace")[:20])
