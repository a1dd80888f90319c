"""The folder of a job: one launcher at a time has it, and nothing of another job is in it."""

import contextlib
import fcntl
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_bamboo.agent.job import JOB_FILE
from megatron_bamboo.agent.outcome import OUTCOME_FILE
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.stores import has_begun

LOCK_FILE = "lock"
NAMED_SECONDS = 1.0
"""So long after it has taken the lock at most a launcher has left its name there."""


class FolderHeld(UserError):
    """Another launcher has the folder."""

    def __init__(self, job_dir: Path, holder: str) -> None:
        super().__init__(
            f"the job in {job_dir} has a coordinator already ({holder}): give another --job-dir "
            "for another job"
        )
        self.who = holder
        self.host = holder.rpartition(" on ")[2]
        """Its machine's name."""


@contextlib.contextmanager
def held(job_dir: Path) -> Iterator[None]:
    """Make the folder if need be; within it this launcher alone has it.

    The lock is the kernel's: it ends with this process, however that ends.

    Raises:
        FolderHeld: another one has it.
        UserError: it cannot be made or written to.
    """
    try:
        lock = _open_lock(job_dir)
    except OSError as error:
        raise UserError(
            f"--job-dir {job_dir} cannot be made or written to ({error.strerror}): give a folder "
            "that can"
        ) from error
    try:
        _take(lock, job_dir)
        os.ftruncate(lock, 0)
        os.pwrite(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
        yield
    finally:
        os.close(lock)


def preparer(job_dir: Path) -> str | None:
    """Who has the folder, as far as can be seen without a hand on its lock; None if nobody has.

    A launcher on another machine counts as alive: its lock may be that machine's alone.
    """
    try:
        words = (job_dir / LOCK_FILE).read_text().split()
    except OSError:
        return None
    match words:
        case ["process", pid, "on", host] if (
            host != socket.gethostname() or Path("/proc", pid).exists()
        ):
            return " ".join(words)
    return None


def goes_on(job_dir: Path) -> bool:
    """Whether there is a job in this folder that has begun and not ended.

    Raises:
        UserError: its store does not say.
    """
    is_prepared = (job_dir / JOB_FILE).exists() and not (job_dir / OUTCOME_FILE).exists()
    return is_prepared and has_begun(job_dir)


def _take(lock: int, job_dir: Path) -> None:
    until = time.monotonic() + NAMED_SECONDS
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            holder = os.pread(lock, 200, 0).decode().strip()
            if holder or time.monotonic() >= until:
                raise FolderHeld(job_dir, holder or "which does not say who it is") from None
            time.sleep(NAMED_SECONDS / 100)
        except OSError as error:
            raise UserError(
                f"--job-dir {job_dir} cannot be locked ({error.strerror}): give a folder on a file "
                "system that keeps locks"
            ) from error


def _open_lock(job_dir: Path) -> int:
    if job_dir.exists() and not job_dir.is_dir():
        raise UserError(f"--job-dir {job_dir} is no folder")
    job_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=job_dir):
        pass
    return os.open(job_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
