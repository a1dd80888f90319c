"""What a job knows, on disk: the store's keys, what was said, and who may change them.

One SQLite file in the job folder, so that a coordinator may die at any moment and the next one
goes on from what is there. One coordinator leads at a time: each has a generation, every write is
one transaction that looks whether that is still the newest, and a coordinator that was stopped
while another took its place finds itself deposed. Only processes die, so nothing is synced: what a
transaction has written is the kernel's.
"""

import contextlib
import json
import os
import sqlite3
import time
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megatron_bamboo.membership.clock import boot_time
from megatron_bamboo.membership.leadership import (
    Deposed,
    Hooks,
    Leader,
    LeaderLives,
    News,
    is_alive,
    started_at,
)
from megatron_bamboo.membership.table import Answered, Change, Put, Removed, Said

JOURNAL_FILE = "store.sqlite"
# Whoever holds a lock is done within microseconds, unless it was stopped just then.
LOCK_SECONDS = 5.0

_SCHEMA = """
CREATE TABLE IF NOT EXISTS keys (key TEXT PRIMARY KEY, value BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS answers (key TEXT, request TEXT, total INTEGER, UNIQUE (key, request));
CREATE TABLE IF NOT EXISTS said (number INTEGER PRIMARY KEY, text TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS leader (
    one INTEGER PRIMARY KEY CHECK (one = 1),
    generation INTEGER, pid INTEGER, started INTEGER, beat REAL
);
"""


class Journal:
    """The file as its leader uses it, and whoever wants to be."""

    def __init__(self, path: Path, hooks: Hooks | None = None) -> None:
        self._db = _connect(path)
        self._hooks = Hooks() if hooks is None else hooks
        self.generation = 0
        """This leader's own; 0 before it has claimed any."""

    def claim(self, limit_seconds: float) -> int:
        """Lead from now on; the generation.

        Raises:
            LeaderLives: another one's process is there, and its last sign of life is not older
                than ``limit_seconds``.
        """
        with self._transaction():
            leader = read_leader(self._db)
            if leader is not None and is_alive(leader, limit_seconds):
                raise LeaderLives(f"coordinator {leader.generation} (process {leader.pid}) leads")
            generation = 1 if leader is None else leader.generation + 1
            pid = os.getpid()
            row = (generation, pid, started_at(pid), boot_time())
            self._db.execute("INSERT OR REPLACE INTO leader VALUES (1, ?, ?, ?, ?)", row)
        self.generation = generation
        return generation

    def load(self) -> Iterable[Change]:
        """What makes the table as it was."""
        for key, value in self._db.execute("SELECT key, value FROM keys ORDER BY rowid"):
            yield Put(key, value)
        for row in self._db.execute("SELECT key, request, total FROM answers"):
            yield Answered(*row)

    def keep(self, changes: Sequence[Change]) -> None:
        """Write some changes in one transaction, if this is still the leader."""
        keys = [change.key for change in changes if isinstance(change, Put)]
        self._hooks.before(keys)
        with self.leading():
            for change in changes:
                self._write(change)
        self._hooks.after(keys)

    def check(self) -> None:
        """Make sure that this is still the leader."""
        with self._ending_at_failures():
            self._check()

    async def kept(self) -> None:
        """Make sure that this is still the leader; what was given is kept already."""
        self.check()

    def flush(self) -> None:
        """The same for who does not run in an event loop."""
        self.check()

    def beat(self) -> None:
        """Show that the leader lives."""
        with self.leading():
            self._db.execute("UPDATE leader SET beat = ?", (boot_time(),))

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Within it nobody else can begin to lead; Deposed if another does already."""
        with self._ending_at_failures(), self._transaction():
            self._check()
            yield

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _check(self) -> None:
        leader = read_leader(self._db)
        if leader is None or leader.generation != self.generation:
            now = "nobody" if leader is None else f"coordinator {leader.generation}"
            raise Deposed(f"coordinator {self.generation} is deposed: {now} leads")

    def _write(self, change: Change) -> None:
        run = self._db.execute
        match change:
            case Put(key, value):
                # An old key keeps its place: what was first stays first.
                conflict = "ON CONFLICT (key) DO UPDATE SET value = excluded.value"
                run(f"INSERT INTO keys VALUES (?, ?) {conflict}", (key, value))
            case Removed(key):
                run("DELETE FROM keys WHERE key = ?", (key,))
                run("DELETE FROM answers WHERE key = ?", (key,))
            case Answered(key, request, total):
                run("INSERT INTO answers VALUES (?, ?, ?)", (key, request, total))
            case Said(text):
                run("INSERT INTO said (text) VALUES (?)", (text,))

    @contextlib.contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    @contextlib.contextmanager
    def _ending_at_failures(self) -> Iterator[None]:
        try:
            yield
        except (Deposed, OSError, sqlite3.Error) as error:
            if self._hooks.failed is None:
                raise
            self._hooks.failed(error)


class JournalReader:
    """The file as the launcher reads it.

    It is open only for the time of a look: SQLite keeps what it knows of an open file for the whole
    process, and a forked coordinator would take that for its own.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = 0
        _connect(path).close()

    def look(self) -> News:
        """What is there, and new."""
        query = "SELECT number, text FROM said WHERE number > ? ORDER BY number"
        with contextlib.closing(sqlite3.connect(self._path, timeout=LOCK_SECONDS)) as db:
            leader = read_leader(db)
            rows = db.execute(query, (self._number,)).fetchall()
        if rows:
            self._number = rows[-1][0]
        return News(leader, tuple(json.loads(text) for _, text in rows))


def _connect(path: Path) -> sqlite3.Connection:
    db = sqlite3.connect(path, timeout=LOCK_SECONDS, isolation_level=None)
    _log_ahead(db)
    db.execute("PRAGMA synchronous = OFF")
    db.executescript(_SCHEMA)
    return db


def _log_ahead(db: sqlite3.Connection) -> None:
    """Let readers and the writer not wait for each other; for this SQLite waits for no lock."""
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            db.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > until:
                raise
        time.sleep(0.001)


def read_leader(db: sqlite3.Connection) -> Leader | None:
    """Who leads; None before anyone has."""
    row = db.execute("SELECT generation, pid, started, beat FROM leader").fetchone()
    return None if row is None else Leader(*row)
