"""Watches one node's source of notices from a thread of its own, beside whatever the node does.

A source that never answered is asked ever more rarely, and said once to be absent: a job that runs
elsewhere than it was told loses nothing by it.
"""

import contextlib
import itertools
import queue
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megatron_bamboo.cloud.asking import BadAnswer, NoAnswer
from megatron_bamboo.cloud.aws import Aws
from megatron_bamboo.cloud.azure import Azure
from megatron_bamboo.cloud.by_file import ByFile
from megatron_bamboo.cloud.gcp import Gcp
from megatron_bamboo.cloud.source import Source, Word
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.leaving import Notice

NO_SOURCE = "none"
FILE_PREFIX = "file:"
NODE_MARK = "{node}"
LONGEST_WAIT_SECONDS = 60.0
SOONER_SECONDS = 5.0
"""A time that comes nearer by more is news; by less the same time may be said twice."""
# A node that has left has nothing more to lose than its cloud's patience.
ACKNOWLEDGE_SECONDS = 5.0


def source_of(text: str, node: str) -> Source | None:
    """The source that ``--notices`` names, None for none.

    Raises:
        UserError: it names none.
    """
    match text:
        case "none":
            return None
        case "aws":
            return Aws()
        case "gcp":
            return Gcp()
        case "azure":
            return Azure()
    path = text.removeprefix(FILE_PREFIX)
    if path and path != text:
        return ByFile(Path(path.replace(NODE_MARK, node)))
    raise UserError(
        f"--notices {text}: give aws, gcp, azure, none, or {FILE_PREFIX}PATH, where PATH may "
        f"contain {NODE_MARK}"
    )


class NoticeWatch:
    """What a node's agent has heard of its machine and not told yet."""

    def __init__(self, source: Source | None) -> None:
        self._source = source
        self._news: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._numbers = itertools.count(1)
        self._has_left = threading.Event()
        self._told: Notice | None = None
        self._due: float | None = None
        """When the machine is taken, by the notice that was put last, if it says so."""
        self._hint = ""
        self.is_signalled = False
        """Whether this process got a signal to end."""
        self._has_answered = False
        self._is_absent = False
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to ask the source, if there is one; after the last fork of this process."""
        if self._source is not None:
            self._thread = threading.Thread(target=self._run, name="notices", daemon=True)
            self._thread.start()

    def signalled(self, cause: str) -> None:
        """This process got a signal to end; called where signals are handled."""
        self.is_signalled = True
        self._put(Notice(cause))

    def take(self) -> Iterator[Mapping[str, Any]]:
        """What is new since the last call, as facts for whoever leads the job."""
        with contextlib.suppress(queue.Empty):
            while True:
                yield self._news.get_nowait()

    def acknowledge(self) -> None:
        """The node has left the job: tell its cloud, if that wants to know, and end."""
        self._has_left.set()
        if self._thread is not None:
            self._thread.join(ACKNOWLEDGE_SECONDS)

    def _run(self) -> None:
        assert self._source is not None
        wait = 0.0
        while not self._has_left.wait(wait):
            try:
                word = self._source.look()
            except (NoAnswer, BadAnswer) as error:
                wait = self._wait_after_failure(wait, error)
            else:
                self._has_answered, self._is_absent = True, False
                wait = self._source.look_seconds
                self._hear(word)
        if self._told is not None:
            with contextlib.suppress(NoAnswer, BadAnswer):  # then the cloud waits for its own time
                self._source.acknowledge()

    def _wait_after_failure(self, waited: float, error: Exception) -> float:
        """How long to wait after a question without a good answer, which is said once."""
        assert self._source is not None
        shortest = self._source.look_seconds
        if not self._is_absent:
            self._is_absent = True
            again = "for a while" if self._has_answered else "(is this such a machine?)"
            self._remark(f"no notices from {self._source.name} {again}: {error}")
        if self._has_answered:
            return shortest
        return min(max(shortest, 2 * waited), LONGEST_WAIT_SECONDS)

    def _hear(self, word: Word) -> None:
        if word.hint and word.hint != self._hint:
            self._remark(f"{word.hint}; nothing is done about it")
        self._hint = word.hint
        before, self._told = self._told, word.notice
        if word.notice is not None:
            self._hear_notice(before, word.notice)
        # After a signal the machine goes, whatever its cloud says.
        elif before is not None and not self.is_signalled:
            self._put(Notice(before.cause, is_over=True))

    def _hear_notice(self, before: Notice | None, notice: Notice) -> None:
        """Put a notice, unless it says what is known."""
        due = None if notice.seconds is None else time.monotonic() + notice.seconds
        is_other = before is None or before.cause != notice.cause
        is_sooner = due is not None and (self._due is None or due < self._due - SOONER_SECONDS)
        if is_other or is_sooner:
            self._due = due
            self._put(notice)

    def _remark(self, text: str) -> None:
        self._news.put({"op": "remark", "text": text})

    def _put(self, notice: Notice) -> None:
        number = next(self._numbers)
        self._news.put({"op": "notice", "notice": notice.to_json(), "number": number})
