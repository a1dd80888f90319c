"""How a job ended: what its coordinator leaves in the job folder, for launcher and agents."""

import json
import os
import time
from dataclasses import asdict, dataclass
from enum import IntEnum
from pathlib import Path
from typing import Self

from megatron_bamboo.membership.address import PASSING_ERRORS

OUTCOME_FILE = "outcome.json"
OUTCOME_KEY = "outcome"
TRIES = 5
AGAIN_SECONDS = 0.2


class Status(IntEnum):
    """How a job ended, as an exit status."""

    FINISHED = 0
    FAILED = 1
    USER_ERROR = 2
    NO_HOLDER = 3
    INJECTION_NOT_REACHED = 4
    NO_PROGRESS = 5
    STOPPED = 6
    """Its user, or the end of its time, wanted it."""
    INTERRUPTED = 130


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended, with one line for its user where it did not just finish."""

    status: Status
    message: str = ""
    lost: tuple[tuple[str, str], ...] = ()
    """The nodes lost on the way, each with the sign that it was lost."""

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The outcome that ``to_json`` wrote."""
        values = json.loads(text)
        lost = tuple((node, cause) for node, cause in values["lost"])
        return cls(Status(values["status"]), values["message"], lost)

    def write(self, job_dir: Path) -> None:
        """Leave it in the job folder, whole or not at all."""
        beside = job_dir / f"{OUTCOME_FILE}.{os.getpid()}"
        beside.write_text(self.to_json() + "\n")
        beside.rename(job_dir / OUTCOME_FILE)

    @classmethod
    def read(cls, job_dir: Path) -> Self | None:
        """How the job in a folder ended; None while it has not.

        A network's file system may refuse a file in the moment in which it comes.

        Raises:
            OSError: it cannot be read, this time and when it is tried again.
        """
        tries = 0
        while True:
            try:
                return cls.from_json((job_dir / OUTCOME_FILE).read_text())
            except FileNotFoundError:
                return None
            except OSError as error:
                tries += 1
                if error.errno not in PASSING_ERRORS or tries == TRIES:
                    raise
            time.sleep(AGAIN_SECONDS)
