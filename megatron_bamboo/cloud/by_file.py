"""A file as a notice: for clouds that are not known here, and for tests.

While the file is there the machine is to be taken. It may hold the seconds that are left; when it
is removed the notice has proved false.
"""

from pathlib import Path

from megatron_bamboo.cloud.asking import BadAnswer
from megatron_bamboo.cloud.source import NOTHING, Word
from megatron_bamboo.membership.leaving import Notice


class ByFile:
    """Looks for a file."""

    name = "file"
    look_seconds = 0.25

    def __init__(self, path: Path) -> None:
        self._path = path

    def look(self) -> Word:
        """Whether it is there."""
        try:
            text = self._path.read_text().strip()
        except FileNotFoundError:
            return NOTHING
        except (OSError, UnicodeDecodeError) as error:
            raise BadAnswer(f"{self._path} cannot be read: {error}") from error
        return Word(read_file(text, self._path))

    def acknowledge(self) -> None:
        """Nobody asks for it."""


def read_file(text: str, path: Path) -> Notice:
    """What a file's text says: nothing, or the seconds that are left."""
    if not text:
        return Notice(f"file {path}")
    try:
        seconds = float(text)
    except ValueError as error:
        raise BadAnswer(
            f"{path} holds {text[:40]!r}: write the seconds left, or nothing"
        ) from error
    if not 0 <= seconds < float("inf"):
        raise BadAnswer(f"{path} holds {text[:40]!r}: that is no number of seconds")
    return Notice(f"file {path}", seconds)
