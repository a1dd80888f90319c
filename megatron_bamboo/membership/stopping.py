"""A wish that the whole job ends, in the store: so whoever leads the job next knows it too."""

import json
from dataclasses import asdict, dataclass
from typing import Self

STOP_KEY = "stop"
TOLD_TO_END = "SIGUSR1, as at the end of its time"
"""What a launcher was told by that signal, whoever sent it."""


@dataclass(frozen=True, slots=True)
class StopWish:
    """That the job ends, and how."""

    saves: bool
    """Whether the step under way is to be completed and saved first."""
    cause: str

    def to_json(self) -> str:
        """The value of ``stop``."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The wish that ``to_json`` wrote; ValueError for anything else."""
        match json.loads(text):
            case {"saves": bool(saves), "cause": str(cause)}:
                return cls(saves, cause)
        raise ValueError(f"this is no wish to stop: {text!r}")
