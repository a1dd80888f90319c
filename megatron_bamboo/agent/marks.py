"""What must be alike on all nodes of a job, as short marks that can be compared.

The code is compared whole, and so are small files. Of files that may be as large as a data set are
the size, both ends and blocks spread evenly between them: that takes a moment, and tells another
text or another tokenizer, but not a few bytes changed in the middle.
"""

import hashlib
import os
import platform
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import megatron_bamboo

PACKAGE = Path(megatron_bamboo.__file__).parent
LIBRARIES = ("torch", "megatron-core", "numpy")
"""Whose version decides what is computed."""
BLOCK_BYTES = 1 << 16
NUM_BLOCKS = 64
MISSING = "missing"

Marks = Mapping[str, str]
"""By name of what is to be alike its mark."""


def code_marks() -> Marks:
    """The marks of this package and of what it stands on: to be taken when a process begins, for
    what it runs stays the same when files are changed later."""
    marks = {"Python": ".".join(platform.python_version_tuple()[:2])}
    marks |= {library: _version_of(library) for library in LIBRARIES}
    for file in sorted(PACKAGE.rglob("*.py")):
        marks[str(file.relative_to(PACKAGE.parent))] = mark_of(file)
    return marks


def file_marks(directory: Path, script: str, inputs: Sequence[tuple[str, str]]) -> Marks:
    """The marks of the other files that a node would need here.

    Args:
        directory: where the script runs: what is named may be relative to it.
        inputs: files that must be alike, each with what names it, like a flag.
    """
    named = (("script", script), *inputs)
    return {f"{name} {path}": mark_of(directory / path) for name, path in named}


def mark_of(path: Path) -> str:
    """A file's size and digest: of all that it holds, or of blocks of it if that is much."""
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest = hashlib.sha256()
            for start in _starts(size):
                file.seek(start)
                digest.update(file.read(BLOCK_BYTES))
    except OSError as error:
        return MISSING if isinstance(error, FileNotFoundError) else f"unreadable: {error.strerror}"
    return f"{size} bytes, {digest.hexdigest()[:12]}"


def difference(ours: Marks, theirs: Marks) -> str | None:
    """What differs here from a job's marks, in words; None if nothing does."""
    names = [name for name in theirs if ours.get(name, MISSING) != theirs[name]]
    names += [name for name in ours if name not in theirs]
    if not names:
        return None
    first, *others = names
    words = f"{first}: here {ours.get(first, MISSING)}, the job's {theirs.get(first, MISSING)}"
    return f"{words} (and {len(others)} more)" if others else words


def difference_since(
    code: Marks, directory: Path, script: str, inputs: Sequence[tuple[str, str]]
) -> Callable[[], str | None]:
    """Gives a function that says what is another by then than now.

    Args:
        code: the marks of the code that this process runs; the others as of ``file_marks``.
    """

    def now() -> Marks:
        return file_marks(directory, script, inputs)

    before = {**code, **now()}
    return lambda: difference({**code_marks(), **now()}, before)


def _starts(size: int) -> Sequence[int]:
    """Where the blocks begin that count of a file of this size."""
    if size <= NUM_BLOCKS * BLOCK_BYTES:
        return range(0, size, BLOCK_BYTES)
    last = size - BLOCK_BYTES
    return [last * number // (NUM_BLOCKS - 1) for number in range(NUM_BLOCKS)]


def _version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return MISSING
