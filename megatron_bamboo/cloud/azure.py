"""Azure: Scheduled Events, half a minute and more before an eviction.

``GET /metadata/scheduledevents`` gives ``{"DocumentIncarnation": n, "Events": [..]}``. Each event
has ``EventId``, ``EventType`` (Preempt, Terminate, Reboot, Redeploy, or Freeze for a few seconds),
``Resources`` (names of any machines of the set, not only of this one), ``EventStatus`` (Scheduled,
Started) and ``NotBefore``, which comes in two formats and is empty once it has started. The first
question may take two minutes, since it switches the service on. An event that is cancelled is there
no more. ``POST`` of ``{"StartRequests": [{"EventId": id}]}`` lets an event begin before its time,
for all its machines: so that is said only of those that concern this one alone.

learn.microsoft.com/azure/virtual-machines/linux/scheduled-events
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from typing import Any

from megatron_bamboo.cloud.asking import Answer, BadAnswer, Server
from megatron_bamboo.cloud.source import Word
from megatron_bamboo.membership.leaving import Notice

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
HEADERS = {"Metadata": "true"}
FIRST_SECONDS = 130.0
TAKING = ("Preempt", "Terminate", "Reboot", "Redeploy")


@dataclass(frozen=True, slots=True)
class ScheduledEvent:
    """One event, as far as it matters here."""

    id: str
    kind: str
    machines: tuple[str, ...]
    not_before: datetime | None
    """None: it may begin at any moment, or has."""


class Azure:
    """The metadata server of an Azure virtual machine."""

    name = "azure"
    look_seconds = 1.0

    def __init__(
        self,
        server: Server = Server(),  # noqa: B008
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._server = server
        self._now = now
        self._machine = ""
        self._seconds = FIRST_SECONDS
        self._own: tuple[ScheduledEvent, ...] = ()

    def look(self) -> Word:
        """Whether an event is scheduled that takes this machine."""
        if not self._machine:
            self._machine = read_name(self._server.ask(NAME_PATH, HEADERS))
        answer = self._server.ask(EVENTS_PATH, HEADERS, seconds=self._seconds)
        events = read_events(answer)
        self._seconds = self._server.seconds
        self._own = tuple(event for event in events if self._machine in event.machines)
        return word_of(self._own, self._now())

    def acknowledge(self) -> None:
        """Let the events begin that take this machine and no other."""
        ids = [e.id for e in self._own if e.kind in TAKING and e.machines == (self._machine,)]
        if not ids:
            return
        body = json.dumps({"StartRequests": [{"EventId": event_id} for event_id in ids]}).encode()
        answer = self._server.ask(EVENTS_PATH, HEADERS, method="POST", body=body)
        if answer.status != 200:
            raise BadAnswer(f"StartRequests was answered with status {answer.status}")


def read_name(answer: Answer) -> str:
    """The name of this machine, as events have it; BadAnswer if there is none."""
    name = answer.text()
    if answer.status != 200 or not name or not name.isprintable():
        raise BadAnswer(f"the machine's name was answered with status {answer.status}")
    return name


def read_events(answer: Answer) -> tuple[ScheduledEvent, ...]:
    """All events of the document; BadAnswer if it is no such document."""
    if answer.status != 200:
        raise BadAnswer(f"scheduled events were answered with status {answer.status}")
    match answer.json("the document of scheduled events"):
        case {"Events": list(events)}:
            return tuple(map(_event, events))
    raise BadAnswer("there are no scheduled events in the answer")


def word_of(own: tuple[ScheduledEvent, ...], now: datetime) -> Word:
    """What this machine's events come to: the first one that takes it, or a hint."""
    taking = sorted(_seconds_left(own, now))
    if taking:
        seconds, kind = taking[0]
        return Word(Notice(f"Azure: {kind}", seconds))
    return Word(hint=", ".join(f"Azure: {event.kind}" for event in own))


def _seconds_left(own: tuple[ScheduledEvent, ...], now: datetime) -> Iterator[tuple[float, str]]:
    for event in own:
        if event.kind in TAKING:
            left = 0.0 if event.not_before is None else (event.not_before - now).total_seconds()
            yield max(0.0, left), event.kind


def _event(values: Any) -> ScheduledEvent:
    match values:
        case {"EventId": str(number), "EventType": str(kind), "Resources": list(machines)}:
            time = _time(values.get("NotBefore") or "")
            return ScheduledEvent(number, kind, tuple(map(str, machines)), time)
    raise BadAnswer(f"a scheduled event is {str(values)[:80]}")


def _time(text: str) -> datetime | None:
    """From ``Mon, 19 Sep 2016 18:29:47 GMT`` or ``2016-09-19T18:29:47Z``."""
    if not text:
        return None
    try:
        time = parsedate_to_datetime(text) if "," in text else datetime.fromisoformat(text)
    except ValueError as error:
        raise BadAnswer(f"{text} is no time") from error
    return time if time.tzinfo is not None else time.replace(tzinfo=UTC)
