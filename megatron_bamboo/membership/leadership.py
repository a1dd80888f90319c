"""Who leads a job: one coordinator at a time, known by its generation and its signs of life.

The same words for every kind of store: where the leader is kept and how it is deposed is the
store's own (``journal.py``, ``etcd_journal.py``).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from megatron_bamboo.membership.clock import boot_time


class LeaderLives(Exception):
    """Another coordinator leads, and has shown so lately."""


class Deposed(Exception):
    """Another coordinator leads: this one must change nothing and answer nobody."""


@dataclass(frozen=True, slots=True)
class Leader:
    """Who leads, and its last sign of life."""

    generation: int
    pid: int
    started: int
    """When its process began, which tells it from a later one with its number."""
    beat: float
    """On the clock that runs since this machine was started."""
    machine: str = ""
    """Where its process is (``machine_name``); empty for this machine."""

    @property
    def is_here(self) -> bool:
        """Whether its process is one of this machine's."""
        return self.machine in ("", machine_name())


@dataclass(frozen=True, slots=True)
class Hooks:
    """What a coordinator's process wants of its journal."""

    failed: Callable[[Exception], NoReturn] | None = None
    """Called instead of raising: nothing may go on that a change could not be kept of."""
    before: Callable[[Sequence[str]], None] = lambda keys: None
    """Called before a write, with the keys that it sets."""
    after: Callable[[Sequence[str]], None] = lambda keys: None


@dataclass(frozen=True, slots=True)
class News:
    """What a look into a journal has found."""

    leader: Leader | None
    """Who leads, or led last; None before anyone has."""
    facts: tuple[dict[str, Any], ...] = ()
    """What was said since the last look, each once."""
    is_away: bool = False
    """The store did not answer: nothing is known of now, and nobody is to be judged by it."""


def is_alive(leader: Leader, limit_seconds: float) -> bool:
    """Whether a leader has shown itself within the limit, and its process is there.

    Of another machine's processes only the signs of life are known.
    """
    age = boot_time() - leader.beat
    is_there = not leader.is_here or started_at(leader.pid) == leader.started
    return age <= limit_seconds and is_there


def machine_name() -> str:
    """Names all that share this process's numbers: one start of one machine, or of a container."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}/{Path('/proc/self/ns/pid').stat().st_ino}"


def started_at(pid: int) -> int:
    """When a process began; 0 for one that is gone, or dead and not reaped yet."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0
    return 0 if fields[0] in "ZX" else int(fields[19])
