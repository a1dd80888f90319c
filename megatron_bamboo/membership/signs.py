"""Signs of life: a page of memory in which a worker says where it is, and its agent reads it.

One byte goes the other way: by it the agent asks the worker to end after its step.

The agent makes the page, so that it can be read whatever becomes of the worker: one that is
stopped, or whose every thread is blocked, says nothing more, and that is a sign too. Writing costs
microseconds, once before and once after each action. A thread beats beside the main thread.
"""

import json
import mmap
import os
import struct
import threading
import zlib
from dataclasses import asdict, dataclass

from megatron_bamboo.membership.place import Place
from megatron_bamboo.membership.waits import Waiting

BEAT_SECONDS = 0.2
# As much as a wait for thousands of workers may need; only what is written takes memory.
_PAGE_BYTES = 1 << 20
_BEAT = struct.Struct("=Q")
_HEAD = struct.Struct("=II")  # checksum and length of the text behind it
_TEXT = _BEAT.size + _HEAD.size
_END = _PAGE_BYTES - 1  # what the agent says: whether the training is to end


@dataclass(frozen=True, slots=True)
class Signs:
    """What a worker showed when its agent looked."""

    beat: int
    """Grows as long as any thread of the worker can run."""
    number: int
    """Grows whenever the main thread comes to another place."""
    place: Place
    limit_seconds: float
    """How long it may be there: by itself, or once those that it waits for have done their part."""
    waiting: Waiting | None = None
    """Whom it waits for; None where nobody else has to act."""


class SignPage:
    """The page of one worker, on either side."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._page = mmap.mmap(descriptor, _PAGE_BYTES)
        self._beat = 0
        self._number = 0

    @classmethod
    def make(cls, worker: str) -> "SignPage":
        """The agent's side; it must live as long as the worker."""
        descriptor = os.memfd_create(f"signs-{worker}")
        os.truncate(descriptor, _PAGE_BYTES)
        return cls(descriptor)

    @classmethod
    def open(cls, path: str) -> "SignPage":
        """The worker's side of what its agent made."""
        return cls(os.open(path, os.O_RDWR | os.O_CLOEXEC))

    @property
    def path(self) -> str:
        """Where the worker finds it."""
        return f"/proc/{os.getpid()}/fd/{self._descriptor}"

    def start_beats(self) -> None:
        """Beat from a thread of this process, as long as it can run."""
        threading.Thread(target=self._run_beats, name="beats", daemon=True).start()

    def beat(self) -> None:
        """Show that this process runs."""
        self._beat += 1
        self._page[: _BEAT.size] = _BEAT.pack(self._beat)

    def show(self, place: Place, limit_seconds: float, waiting: Waiting | None = None) -> None:
        """Show where the main thread is; only one thread may."""
        self._number += 1
        values = {"number": self._number, "place": asdict(place), "limit_seconds": limit_seconds}
        values["waiting"] = None if waiting is None else asdict(waiting)
        text = json.dumps(values).encode()
        assert _TEXT + len(text) <= _END, f"{place} is too long to be shown"
        self._page[_TEXT : _TEXT + len(text)] = text
        self._page[_BEAT.size : _TEXT] = _HEAD.pack(zlib.crc32(text), len(text))

    def ask_to_end(self) -> None:
        """Ask the worker to end after its step; the agent's to do."""
        self._page[_END] = 1

    @property
    def must_end(self) -> bool:
        """Whether the agent has asked."""
        return self._page[_END] == 1

    def read(self) -> Signs | None:
        """What is shown now; None where nothing is yet, or in the moment of a change."""
        (beat,) = _BEAT.unpack(self._page[: _BEAT.size])
        checksum, length = _HEAD.unpack(self._page[_BEAT.size : _TEXT])
        text = self._page[_TEXT : _TEXT + length]
        if not length or zlib.crc32(text) != checksum:
            return None
        values = json.loads(text)
        place, waiting = Place(**values.pop("place")), values.pop("waiting")
        shown = None if waiting is None else Waiting.from_fields(waiting)
        return Signs(beat, place=place, waiting=shown, **values)

    def _run_beats(self) -> None:
        pause = threading.Event()
        while True:
            self.beat()
            pause.wait(BEAT_SECONDS)
