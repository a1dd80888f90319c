"""The journal as those see it who only watch: at one moment, and without touching it.

A file that is open for reading only holds up no leader, and is open only for the time of a look.
"""

import contextlib
import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_bamboo.membership.journal import LOCK_SECONDS, read_leader
from megatron_bamboo.membership.leadership import Leader


class Snapshot:
    """What the journal holds at one moment."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def leader(self) -> Leader | None:
        """Who leads; None before anyone has."""
        return read_leader(self._db)

    def get(self, key: str) -> bytes | None:
        """The value of a key, None while it has none."""
        row = self._db.execute("SELECT value FROM keys WHERE key = ?", (key,)).fetchone()
        return None if row is None else bytes(row[0])

    def items(self, prefix: str) -> dict[str, bytes]:
        """The keys that begin with ``prefix``, with their values, oldest first."""
        query = "SELECT key, value FROM keys WHERE substr(key, 1, ?) = ? ORDER BY rowid"
        return dict(self._db.execute(query, (len(prefix), prefix)))

    def facts(self, after: int) -> tuple[int, tuple[dict[str, Any], ...]]:
        """What was said after the fact of a number (0: all); with the number of the newest."""
        query = "SELECT number, text FROM said WHERE number > ? ORDER BY number"
        rows = self._db.execute(query, (after,)).fetchall()
        newest = rows[-1][0] if rows else after
        return newest, tuple(json.loads(text) for _, text in rows)


@contextlib.contextmanager
def snapshot(path: Path) -> Iterator[Snapshot | None]:
    """The journal at this moment; None while it is not there yet.

    Raises:
        sqlite3.DatabaseError: it cannot be read.
    """
    if not path.is_file():
        yield None
        return
    # Without a log beside it nobody writes, and a reader must not leave an empty one behind.
    is_written = path.with_name(f"{path.name}-wal").exists()
    uri = f"{path.absolute().as_uri()}?{'mode=ro' if is_written else 'immutable=1'}"
    with contextlib.closing(
        sqlite3.connect(uri, uri=True, timeout=LOCK_SECONDS, isolation_level=None)
    ) as db:
        db.execute("BEGIN")
        made = db.execute("SELECT count(*) FROM sqlite_master WHERE name = 'leader'").fetchone()[0]
        yield Snapshot(db) if made else None
