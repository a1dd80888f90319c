"""What the tests ask of the fork server, and what it answers: JSON both ways."""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

STALL_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class JobRequest:
    """A whole job: what ``bamboo run --nodes N SCRIPT FLAGS`` would be told."""

    folder: str
    """Holds the job folder ``job`` and what the fork server notes beside it."""
    num_nodes: int
    flags: tuple[str, ...]
    script: str
    injections: tuple[str, ...] = ()
    workers_per_node: int = 1
    namespaces: str = ""
    """Prefix of the network namespaces that nodes and launcher live in; by default none."""
    num_standbys: int = 0
    respawn_seconds: float | None = None
    notices: str = "none"
    stall_seconds: float = STALL_SECONDS
    """Without an iteration, before the job ends."""
    store: str | None = None
    """As ``--store`` is given; None for the embedded one."""

    @property
    def job_dir(self) -> Path:
        """The job folder proper: nothing but the product writes there."""
        return Path(self.folder) / "job"

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The request that ``to_json`` wrote."""
        values: dict[str, Any] = json.loads(text)
        flags, injections = tuple(values.pop("flags")), tuple(values.pop("injections"))
        return cls(flags=flags, injections=injections, **values)


@dataclass(frozen=True, slots=True)
class JobResult:
    """How a job ended, as its launching process saw it."""

    status: int
    message: str
    lost: Sequence[Sequence[str]] = ()
    lines: Sequence[str] = ()
    """What was said to the user."""
    left_behind: Sequence[str] = field(default=())
    """Processes of the job that were there after its end."""

    def write(self, folder: Path) -> None:
        """Leave it for the tests."""
        (folder / "result.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The result that ``write`` left."""
        return cls(**json.loads((folder / "result.json").read_text()))
