"""The moments of a save, by name: where a test, or ``bamboo run --inject``, lets a node die.

One for each thing that a save changes and that could be left half done.
"""

from collections.abc import Callable
from enum import StrEnum


class SaveMoment(StrEnum):
    """Just before something happens in the save of a step."""

    BEGIN = "SAVE_BEGIN"
    """A worker, writer or not, takes part in the save."""
    WRITE = "SAVE_WRITE"
    """A writer begins its data file; all writers have agreed what to write."""
    SYNC = "SAVE_SYNC"
    """The lead writer has all files, and syncs them."""
    RENAME = "SAVE_RENAME"
    """The lead writer gives the folder its final name."""
    TRACK = "SAVE_TRACK"
    """The lead writer lets the tracker name the folder."""
    END = "SAVE_END"
    """The lead writer has published the checkpoint, and its worker does not know yet."""
    TELL = "SAVE_TELL"
    """The lead writer's worker tells the store."""


BeforeMoment = Callable[[SaveMoment, int], None]
