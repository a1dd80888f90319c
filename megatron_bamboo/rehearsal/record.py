"""What a run has left to judge it by: its events, by kind, and how it ended."""

import json
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.observe.events import read_events

Event = Mapping[str, Any]


class Events:
    """The events of all processes of a run, in the order of their time."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._by_kind: dict[str, list[Event]] = {}
        for event in events:
            self._by_kind.setdefault(event["event"], []).append(event)

    @classmethod
    def read(cls, job_dir: Path) -> Self:
        """All that a job folder holds."""
        return cls(read_events(job_dir / "events"))

    def that_count(self) -> "Events":
        """Without what was undone, since all went back to a checkpoint after it."""
        backs = [(e["epoch"], e["step"]) for e in self.of("restored")]

        def counts(event: Event) -> bool:
            if not {"epoch", "step"} <= event.keys():
                return True
            return not any(event["epoch"] < epoch and event["step"] > step for epoch, step in backs)

        return Events([e for own in self._by_kind.values() for e in own if counts(e)])

    def of(self, kind: str) -> Sequence[Event]:
        """Those of one kind."""
        return self._by_kind.get(kind, [])


def said_steps(lines: Sequence[str]) -> list[int]:
    """The steps of the iteration lines among what a run said."""
    said = [line for line in lines if "] iteration " in line]
    return [int(line.split("iteration")[1].split("/")[0]) for line in said]


def new_events(folder: Path, places: dict[Path, int], kind: str) -> Iterator[Event]:
    """The events of one kind that were written since the last call with these places.

    Args:
        places: by file how far it was read; changed here.
    """
    for path in sorted(folder.glob("*.jsonl")):
        with path.open("rb") as file:
            file.seek(places.get(path, 0))
            whole, end, _ = file.read().rpartition(b"\n")
        places[path] = places.get(path, 0) + len(whole) + len(end)
        for line in whole.splitlines():
            if f'"event": "{kind}"'.encode() in line:
                yield json.loads(line)


@dataclass(frozen=True, slots=True)
class RunRecord:
    """A run that has ended."""

    job_dir: Path
    shape: JobShape
    events: Events
    status: int
    """Its exit status."""
    lines: Sequence[str] = field(repr=False)
    """What it said."""
    left_behind: Sequence[str] = ()
    """Its processes that were there after its end."""
    plans: Mapping[int, Set[str]] = field(default_factory=dict)
    """By epoch the digests of the plans that were seen in the store."""
