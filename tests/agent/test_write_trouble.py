"""Why nothing can be kept in a folder: full, read-only, another user's, or without locks."""

import errno
import os
import shlex
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bamboo.agent import write_trouble
from megatron_bamboo.agent.write_trouble import Trouble, lack_of_room, written_to
from megatron_bamboo.errors import UserError

OPEN = """
import sys
from pathlib import Path
from megatron_bamboo.agent.write_trouble import written_to
from megatron_bamboo.membership.journal import JournalReader
folder = Path(sys.argv[1])
with written_to(folder):
    JournalReader(folder / "store.sqlite")
"""


def test_a_folder_without_room_is_said_to_have_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert lack_of_room(tmp_path) == ""
    assert lack_of_room(tmp_path / "gone") == ""
    monkeypatch.setattr(write_trouble, "LEAST_ROOM_BYTES", 1 << 70)
    assert lack_of_room(tmp_path) == f"; the file system of {tmp_path} has no room left"


@pytest.mark.parametrize(
    ("options", "then", "trouble"),
    [
        ("size=64k", "true", Trouble.FULL),
        ("size=8k", "true", Trouble.FULL),
        ("nr_inodes=2", "true", Trouble.FULL),
        ("size=1m", "mount -o remount,ro {0}", Trouble.READ_ONLY),
    ],
)
def test_a_store_that_cannot_be_kept_on_a_file_system_says_why(
    tmp_path: Path, options: str, then: str, trouble: Trouble
) -> None:
    alone = ["unshare", "--user", "--map-root-user", "--mount"]
    if subprocess.run([*alone, "mount", "-t", "tmpfs", "none", tmp_path], check=False).returncode:
        pytest.skip("a file system of its own is not to be had here")
    where = shlex.quote(str(tmp_path))
    python = shlex.join([sys.executable, "-c", OPEN, str(tmp_path)])
    script = f"mount -t tmpfs -o {options} none {where} && {then.format(where)} && {python}"
    ended = subprocess.run([*alone, "sh", "-c", script], capture_output=True, text=True)
    line = ended.stderr.splitlines()[-1]
    assert f"--job-dir {tmp_path}: the job cannot be kept there" in line
    assert line.endswith(str(trouble))


def test_a_file_that_is_no_store_is_said_to_be_none(tmp_path: Path) -> None:
    (tmp_path / "store.sqlite").write_bytes(b"no store at all" * 100)
    with (
        pytest.raises(UserError, match="another program's file has the name"),
        written_to(tmp_path),
    ):
        sqlite3.connect(tmp_path / "store.sqlite").execute("PRAGMA journal_mode = WAL")


@pytest.mark.parametrize(
    ("number", "trouble"),
    [
        (errno.ENOSPC, Trouble.FULL),
        (errno.EDQUOT, Trouble.FULL),
        (errno.EROFS, Trouble.READ_ONLY),
        (errno.EACCES, Trouble.FORBIDDEN),
    ],
)
def test_what_the_kernel_says_of_a_folder_is_said(
    tmp_path: Path, number: int, trouble: Trouble
) -> None:
    with pytest.raises(UserError) as refused, written_to(tmp_path):
        raise OSError(number, os.strerror(number))
    assert str(refused.value).endswith(f"({os.strerror(number)}): {trouble}")


def test_another_error_is_not_the_folders(tmp_path: Path) -> None:
    with pytest.raises(ConnectionResetError), written_to(tmp_path):
        raise ConnectionResetError(errno.ECONNRESET, "reset")


def test_a_store_without_locks_is_to_be_kept_elsewhere(tmp_path: Path) -> None:
    failure = sqlite3.OperationalError("locking protocol")
    failure.sqlite_errorcode = sqlite3.SQLITE_PROTOCOL
    with pytest.raises(UserError, match="does not keep SQLite's locks"), written_to(tmp_path):
        raise failure
