"""What a coordinator tells the nodes of an open job, which know only where it is.

So no node can run with other flags than the rest, and what is to be given to each node is little.
It is a key of the store, so that only who has the job's secret can read it, or have written it.
What it cannot give them, code and data, they compare with what it says of the job's (``marks.py``),
and whoever differs stays away and leaves word of it.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from megatron_bamboo.agent.job import Deadlines, JobShape, JobSpec
from megatron_bamboo.agent.marks import Marks, difference, file_marks

INVITATION_KEY = "invitation"
SPEAKER_KEY = "speaker"
"""Holds the node that speaks for the script: the first that came."""


@dataclass(frozen=True, slots=True)
class Invitation:
    """All that a node must know of its job."""

    job_dir: str
    directory: str
    """Where the script runs: what its flags name may be relative to it."""
    command: tuple[str, ...]
    """The script and its flags."""
    shape: JobShape
    store_seconds: float
    """How long to look for a coordinator that answers."""
    notices: str
    """Who says that a machine is to be taken."""
    marks: Marks
    """What its code and its data must be alike."""

    @classmethod
    def of(cls, spec: JobSpec, command: Sequence[str], code: Marks) -> Self:
        """To a job that was prepared in this process's working directory.

        Args:
            code: the marks of the code that this process runs.
        """
        store_seconds = spec.deadlines.store_seconds
        marks = {**code, **file_marks(Path.cwd(), command[0], spec.shape.inputs)}
        return cls(
            str(spec.job_dir),
            str(Path.cwd()),
            tuple(command),
            spec.shape,
            store_seconds,
            spec.notices,
            marks,
        )

    def spec(self, interface: str, speaker: str) -> JobSpec:
        """The job, as one of its nodes knows it."""
        return JobSpec(
            (),
            self.shape,
            Path(self.job_dir),
            deadlines=Deadlines(store_seconds=self.store_seconds),
            interface=interface,
            notices=self.notices,
            speaker=speaker,
        )

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str | bytes) -> Self:
        """The invitation that ``to_json`` wrote."""
        values = json.loads(text)
        shape = JobShape.from_fields(values.pop("shape"))
        return cls(command=tuple(values.pop("command")), shape=shape, **values)


def difference_here(invitation: str | bytes, code: Marks) -> str | None:
    """What differs on this machine from a job's code and data, in words; None if nothing does.

    Args:
        invitation: as ``to_json`` wrote it, perhaps that of another version of this package.
        code: the marks of the code that this process runs.
    """
    values = json.loads(invitation)
    directory, script = Path(values["directory"]), values["command"][0]
    inputs = [(name, path) for name, path in values["shape"].get("inputs", ())]
    ours = {**code, **file_marks(directory, script, inputs)}
    return difference(ours, values.get("marks", {}))
