"""A job's store, whichever it has: the one in its folder, or the one in etcd.

Everybody finds it from the job folder alone (``store_place.py``) and uses it by these interfaces.
"""

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol

from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.etcd_client import EtcdClient
from megatron_bamboo.membership.etcd_journal import EtcdJournal
from megatron_bamboo.membership.etcd_reader import Bulletin, EtcdReader, etcd_snapshot
from megatron_bamboo.membership.journal import JOURNAL_FILE, Journal, JournalReader
from megatron_bamboo.membership.leadership import Hooks, Leader, News
from megatron_bamboo.membership.snapshot import snapshot
from megatron_bamboo.membership.store_place import STORE_FILE, EtcdPlace, place_of
from megatron_bamboo.membership.table import Keeper

FIRST_ANSWER_SECONDS = 5.0


class JobJournal(Keeper, Protocol):
    """What a job knows, as its leader uses it and whoever wants to be."""

    @property
    def generation(self) -> int:
        """This leader's own; 0 before it has claimed any."""

    def claim(self, limit_seconds: float) -> int:
        """Lead from now on; the generation.

        Args:
            limit_seconds: how old a leader's last sign of life may be.

        Raises:
            LeaderLives: another one leads.
        """

    def beat(self) -> None:
        """Show that the leader lives."""

    def leading(self) -> AbstractContextManager[None]:
        """Within it nobody else can begin to lead; Deposed if another does already."""

    def flush(self) -> None:
        """Wait until all that was given is kept; Deposed if another one leads."""

    def close(self) -> None:
        """Use it no more."""


class JobReader(Protocol):
    """What a job knows, as its launcher reads it."""

    def look(self) -> News:
        """What is there, and new."""


class StoreSnapshot(Protocol):
    """What a job knows at one moment."""

    def leader(self) -> Leader | None:
        """Who leads, or led last; None before anyone has."""

    def get(self, key: str) -> bytes | None:
        """The value of a key, None while it has none."""

    def items(self, prefix: str) -> dict[str, bytes]:
        """The keys that begin with ``prefix``, with their values, oldest first."""

    def facts(self, after: int) -> tuple[int, tuple[dict[str, Any], ...]]:
        """What was said after the fact of a number (0: all); with the number of the newest."""


def begin_store(job_dir: Path, text: str | None) -> None:
    """Let a new job have the store that ``--store`` names, or the one in its folder.

    Raises:
        UserError: that cannot be its store, or holds another job.
    """
    (job_dir / STORE_FILE).unlink(missing_ok=True)
    if text is None:
        return
    place = EtcdPlace.parse(text, _name_of(job_dir))
    with contextlib.closing(EtcdClient(place)) as client:
        until = time.monotonic() + FIRST_ANSWER_SECONDS
        try:
            known = client.edge(f"{place.name}/", "ASCEND", until)
        except OSError as error:
            raise UserError(
                f"--store {text}: {error}; is it started, and is this its address?"
            ) from error
    if known is not None:
        raise UserError(
            f"--store {text}: etcd holds a job of the name {place.name} already: give another "
            f"--job-dir, or another name behind the hosts, or remove it: "
            f"etcdctl del --prefix {place.name}/"
        )
    (job_dir / STORE_FILE).write_text(f"{place}\n")


def check_store(job_dir: Path, text: str | None) -> None:
    """UserError where ``--store`` names another store than the job in a folder has."""
    known = place_of(job_dir)
    if known != (text and EtcdPlace.parse(text, _name_of(job_dir))):
        has = "in its folder" if known is None else f"at {known}"
        raise UserError(
            f"--store {text or '(none)'}: the job in {job_dir} has its store {has}: give the same "
            "to go on with it, or another folder"
        )


def has_begun(job_dir: Path) -> bool:
    """Whether anyone has begun to lead the job in a folder.

    Raises:
        UserError: etcd does not say.
    """
    place = place_of(job_dir)
    if place is None:
        return (job_dir / JOURNAL_FILE).exists()
    try:
        with etcd_snapshot(place) as known:
            return known is not None
    except OSError as error:
        raise UserError(f"the store of {job_dir} cannot be read: {error}") from error


def led_elsewhere(job_dir: Path) -> Leader | None:
    """Who leads the job in a folder from another machine, as far as its store knows of any.

    Raises:
        OSError: etcd does not answer.
    """
    place = place_of(job_dir)
    if place is None:
        return None
    with etcd_snapshot(place) as known:
        leader = known.leader() if known is not None and known.is_led else None
    return None if leader is None or leader.is_here else leader


def post_end(job_dir: Path, outcome: str) -> None:
    """Tell those who see the store alone how a job has ended that nobody leads any more.

    Raises:
        OSError: etcd does not answer.
    """
    place = place_of(job_dir)
    if place is not None and led_elsewhere(job_dir) is None:
        with contextlib.closing(Bulletin(place)) as bulletin:
            bulletin.post_end(outcome.encode())


def open_journal(job_dir: Path, hooks: Hooks | None = None) -> JobJournal:
    """The journal of the job in a folder."""
    place = place_of(job_dir)
    return Journal(job_dir / JOURNAL_FILE, hooks) if place is None else EtcdJournal(place, hooks)


def open_reader(job_dir: Path) -> JobReader:
    """The launcher's reader of the job in a folder."""
    place = place_of(job_dir)
    return JournalReader(job_dir / JOURNAL_FILE) if place is None else EtcdReader(place)


@contextlib.contextmanager
def snapshot_of(job_dir: Path) -> Iterator[StoreSnapshot | None]:
    """What the job in a folder knows at this moment; None while there is nothing.

    Raises:
        sqlite3.DatabaseError: its file cannot be read.
        OSError: etcd does not answer.
    """
    place: EtcdPlace | None = place_of(job_dir)
    with snapshot(job_dir / JOURNAL_FILE) if place is None else etcd_snapshot(place) as store:
        yield store


def _name_of(job_dir: Path) -> str:
    return f"bamboo/{job_dir.absolute().name}"
