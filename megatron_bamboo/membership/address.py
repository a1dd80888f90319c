"""Where the store is: a fixed address, or a file in which whoever leads the job says where.

The file is written by rename, so that it is whole whenever it is read, and only by a leader, so
that one who was deposed never leads anyone astray.
"""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

ADDRESS_FILE = "coordinator.json"


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator listens."""

    host: str
    port: int
    generation: int = 0
    pid: int = 0

    def write(self, path: Path) -> None:
        """Let everyone who looks find it."""
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(json.dumps(asdict(self)) + "\n")
        beside.rename(path)

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


class Signpost:
    """Knows where the store is now.

    Args:
        text: ``host:port``, or the absolute path of the file that says it.
    """

    def __init__(self, text: str) -> None:
        self._path: Path | None = None
        self._fixed: Address | None = None
        if os.path.isabs(text):
            self._path = Path(text)
        else:
            host, _, port = text.rpartition(":")
            self._fixed = Address(host, int(port))
        self._text = text

    def find(self) -> Address | None:
        """Where the store is; None while nobody has said it."""
        if self._path is None:
            return self._fixed
        try:
            return Address(**json.loads(self._path.read_text()))
        except FileNotFoundError:
            return None

    def __str__(self) -> str:
        return str(self.find() or self._text)
