"""From what is said of a job to whom it is for: its user, the losses file, the event log.

A coordinator says lines and events into its table, each in one write with what it tells of, so
that none is missing and none comes twice whenever a coordinator dies. The launcher, which lives as
long as the job, reads them there and tells them.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog, make_event

LOSSES_FILE = "losses.jsonl"


class Announcer:
    """Takes a coordinator's events for the log, each together with what it tells of."""

    def __init__(self, table: Table, source: str) -> None:
        self._table = table
        self._source = source

    def emit(self, event: str, **fields: object) -> None:
        """Take one event."""
        self._table.say({"event": make_event(event, self._source, fields)})


def is_new(table: Table, what: str) -> bool:
    """Whether something was not said before; it counts as said from now on."""
    key = f"said/{what}"
    if table.get(key) is not None:
        return False
    table.set(key, b"1")
    return True


class Teller:
    """Tells the launcher's user what was said, and writes the losses and the events down.

    Args:
        say: takes the job's lines.
        advance: takes the number of each step that passed.
    """

    def __init__(
        self,
        job_dir: Path,
        say: Callable[[str], None],
        advance: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._losses = job_dir / LOSSES_FILE
        self._events = EventLog(job_dir / "events", "coordinator")
        self._say = say
        self._advance = advance

    def tell_again(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Write down what was said before this launcher began, all of it: how much of it another
        one had written is not known. Its lines were the other one's to say."""
        self._losses.unlink(missing_ok=True)
        self._events.empty()
        for fact in facts:
            self._write(fact)

    def tell(self, facts: Sequence[Mapping[str, Any]]) -> None:
        """Tell some facts, in the order in which they were said."""
        for fact in facts:
            self._write(fact)
            if "line" in fact:
                self._say(fact["line"])
            if "loss" in fact:
                self._advance(fact["loss"]["step"])

    def _write(self, fact: Mapping[str, Any]) -> None:
        if "event" in fact:
            self._events.append(fact["event"])
        for losses in (fact[kind] for kind in ("loss", "evaluation") if kind in fact):
            with self._losses.open("a") as file:
                file.write(json.dumps(losses) + "\n")

    def close(self) -> None:
        """Close the event log."""
        self._events.close()
