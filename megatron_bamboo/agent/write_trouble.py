"""Why nothing can be kept in a job folder, in words that say what mends it.

A full disk, a read-only one, another user's folder and a file system without locks look alike in
what SQLite says, so the folder is asked too.
"""

import contextlib
import errno
import os
import sqlite3
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path

from megatron_bamboo.errors import UserError

LEAST_ROOM_BYTES = 1 << 16
"""Less is less than the job's store may need for a write."""


class Trouble(StrEnum):
    """What is wrong, and what mends it."""

    FULL = "its file system has no room left: make room there, or give a folder on another one"
    READ_ONLY = "its file system is read-only: give a folder that can be written to"
    FORBIDDEN = "this user may not write there: give a folder in which it may"
    NO_STORE = "another program's file has the name of the job's store: give another folder"
    NO_LOCKS = "its file system does not keep SQLite's locks: give a folder of this machine's own"


_OF_ERRNO = {
    errno.ENOSPC: Trouble.FULL,
    errno.EDQUOT: Trouble.FULL,
    errno.EROFS: Trouble.READ_ONLY,
    errno.EACCES: Trouble.FORBIDDEN,
    errno.EPERM: Trouble.FORBIDDEN,
}
_OF_SQLITE = {
    sqlite3.SQLITE_FULL: Trouble.FULL,
    sqlite3.SQLITE_NOTADB: Trouble.NO_STORE,
    sqlite3.SQLITE_CORRUPT: Trouble.NO_STORE,
    sqlite3.SQLITE_READONLY: Trouble.FORBIDDEN,
    sqlite3.SQLITE_CANTOPEN: Trouble.FORBIDDEN,
    sqlite3.SQLITE_PERM: Trouble.FORBIDDEN,
    sqlite3.SQLITE_AUTH: Trouble.FORBIDDEN,
}
_PRIMARY_CODE = 0xFF


@contextlib.contextmanager
def written_to(job_dir: Path) -> Iterator[None]:
    """Within it the files of a job are begun.

    Raises:
        UserError: they cannot be, for a reason that lies in the folder.
    """
    try:
        yield
    except sqlite3.Error as error:
        raise _refusal(job_dir, _of_sqlite(job_dir, error), str(error)) from error
    except OSError as error:
        if (trouble := _OF_ERRNO.get(error.errno or 0)) is None:
            raise
        raise _refusal(job_dir, trouble, str(error.strerror)) from error


def lack_of_room(job_dir: Path) -> str:
    """What to add to a line about a failure: that the folder has no room left, if that is so.

    The log that would say it may have had none either.
    """
    return f"; the file system of {job_dir} has no room left" if _is_full(job_dir) else ""


def _refusal(job_dir: Path, trouble: Trouble, said: str) -> UserError:
    return UserError(f"--job-dir {job_dir}: the job cannot be kept there ({said}): {trouble}")


def _of_sqlite(job_dir: Path, error: sqlite3.Error) -> Trouble:
    """What is wrong where SQLite has failed."""
    if _is_full(job_dir):
        return Trouble.FULL
    if os.statvfs(job_dir).f_flag & os.ST_RDONLY:
        return Trouble.READ_ONLY
    # Some errors are the module's own, without a code.
    code = getattr(error, "sqlite_errorcode", 0) & _PRIMARY_CODE
    return _OF_SQLITE.get(code, Trouble.NO_LOCKS)


def _is_full(job_dir: Path) -> bool:
    """Whether there is no room for what a job writes, or none for another file."""
    try:
        room = os.statvfs(job_dir)
    except OSError:
        return False
    is_full = room.f_blocks > 0 and room.f_bavail * room.f_frsize < LEAST_ROOM_BYTES
    return is_full or (room.f_files > 0 and room.f_favail == 0)
