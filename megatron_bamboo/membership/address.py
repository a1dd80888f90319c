"""Where the store is: a fixed address, or a file in which whoever leads the job says where.

The file is written by rename, so that it is whole whenever it is read, and only by a leader, so
that one who was deposed never leads anyone astray.
"""

import contextlib
import errno
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_bamboo.errors import UserError

ADDRESS_FILE = "coordinator.json"
ADDRESS_KEY = "address"
"""Holds the same in the store, for those who see that and not the folder."""
# What a network's file system answers in the moment in which a file is replaced, or while it is
# away, and what this process gets while it has no descriptor left.
PASSING_ERRORS = (
    errno.ESTALE,
    errno.EIO,
    errno.ETIMEDOUT,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
)


@dataclass(frozen=True, slots=True)
class Address:
    """Where a coordinator listens."""

    host: str
    port: int
    generation: int = 0
    pid: int = 0

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    def write(self, path: Path) -> None:
        """Let everyone who looks find it."""
        beside = path.with_name(f"{path.name}.{os.getpid()}")
        beside.write_text(self.to_json() + "\n")
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
        self._known: Address | None = None
        if os.path.isabs(text):
            self._path = Path(text)
        else:
            host, _, port = text.rpartition(":")
            self._known = Address(host, int(port))
        self._text = text

    def find(self) -> Address | None:
        """Where the store is; None while nobody has said it.

        While the file cannot be read, or is not whole, it is where it was: whoever wrote it writes
        it again.
        """
        if self._path is not None:
            with contextlib.suppress(OSError, UserError):
                self._known = _read(self._path)
        return self._known

    def check(self) -> None:
        """Refuse what a user has given that says nothing of the kind.

        Raises:
            UserError: it is another file, or nobody lets this process read it.
        """
        if self._path is None:
            return
        try:
            _read(self._path)
        except OSError as error:
            if error.errno not in PASSING_ERRORS:
                raise UserError(f"{self._path} cannot be read ({error.strerror})") from error

    def leads_to(self, address: Address) -> bool:
        """Whether a newcomer finds this address here."""
        return Signpost(self._text).find() == address

    def __str__(self) -> str:
        return str(self.find() or self._text)


def _read(path: Path) -> Address | None:
    """What a file says; None where there is none."""
    try:
        match json.loads(path.read_text()):
            case {"host": str(), "port": int()} as values:
                return Address(**values)
    except FileNotFoundError:
        return None
    except (ValueError, TypeError):
        pass
    raise UserError(
        f"{path} does not say where a coordinator is: give {ADDRESS_FILE} of a job's folder"
    )
