"""The event log: one JSON object a line, one file a process that speaks.

Every loss, takeover, pause and byte moved is read back from these files, by tests and by the
quickstart's summary. A line is one ``write`` to a file opened for appending, so that lines of a
node's agent and worker never mix and a SIGKILL never leaves half a line. ``time`` is the monotonic
clock, which all processes of one host share; ``unix`` is for people.
"""

import errno
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Emitter(Protocol):
    """Whoever takes events."""

    def emit(self, event: str, **fields: object) -> None:
        """Take one event."""


def make_event(event: str, source: str, fields: Mapping[str, object]) -> dict[str, object]:
    """One event, of now."""
    head = {"event": event, "source": source, "time": time.monotonic(), "unix": time.time()}
    assert not head.keys() & fields.keys(), f"event {event} overrides {sorted(head)}"
    return {**head, **fields}


class EventLog:
    """Appends the events of one source to ``folder/<source>.jsonl``."""

    def __init__(self, folder: Path, source: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.source = source
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(folder / f"{source}.jsonl", flags, 0o644)

    def emit(self, event: str, **fields: object) -> None:
        """Append one event; what it says is on disk's way before this returns."""
        self.append(make_event(event, self.source, fields))

    def append(self, event: Mapping[str, object]) -> None:
        """Append an event that was made elsewhere."""
        data = (json.dumps(event) + "\n").encode()
        if os.write(self._descriptor, data) != len(data):
            raise OSError(errno.ENOSPC, f"half an event was written for {self.source}")

    def empty(self) -> None:
        """Forget all events of this source."""
        os.truncate(self._descriptor, 0)

    def close(self) -> None:
        """Close the file; a closed log takes no more events."""
        os.close(self._descriptor)


def read_events(folder: Path) -> list[dict[str, Any]]:
    """All events of all sources in ``folder`` so far, in the order of the monotonic clock."""
    events = [event for path in sorted(folder.glob("*.jsonl")) for event in _read_file(path)]
    return sorted(events, key=lambda event: float(event["time"]))


def _read_file(path: Path) -> list[dict[str, Any]]:
    events = []
    # The last line may be one that is being written in this moment.
    whole, _, _ = path.read_text().rpartition("\n")
    for number, line in enumerate(whole.splitlines(), start=1):
        try:
            events.append(json.loads(line))
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}, line {number} is not an event: {error}") from None
    return events
