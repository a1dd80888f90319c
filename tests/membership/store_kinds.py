"""The stores that a job may have, for tests that hold for each."""

import contextlib
import itertools
import sqlite3
import time
from pathlib import Path

from etcd_cluster import Cluster, SlowCluster

from megatron_bamboo.membership import etcd_client
from megatron_bamboo.membership.etcd_client import EtcdClient
from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.membership.leadership import Hooks, LeaderLives
from megatron_bamboo.membership.store_place import place_of
from megatron_bamboo.membership.stores import JobJournal, begin_store, open_journal
from megatron_bamboo.membership.table import Table

KINDS = ("embedded", "etcd")
SECONDS = 30.0
_numbers = itertools.count()


class Store:
    """One job's store; all that is opened is closed in the end."""

    def __init__(self, job_dir: Path, etcd: Cluster | SlowCluster | None) -> None:
        self.job_dir = job_dir
        begin_store(job_dir, etcd and etcd.url(f"tests/{next(_numbers)}"))
        self._place = place_of(job_dir)
        self._opened: list[JobJournal] = []

    @property
    def limit_seconds(self) -> float:
        """As short as one who lives on a busy machine keeps to."""
        return 4.0 if self.is_in_etcd else 0.0

    @property
    def is_in_etcd(self) -> bool:
        """Whether it is that kind."""
        return self._place is not None

    def open(self, hooks: Hooks | None = None) -> JobJournal:
        """The journal, for one that wants to lead."""
        self._opened.append(open_journal(self.job_dir, hooks))
        return self._opened[-1]

    def lead(self, hooks: Hooks | None = None) -> tuple[JobJournal, Table]:
        """Lead as one does whose predecessor has shown no sign of life for long enough."""
        self.end_lease()
        journal = self.open(hooks)
        journal.claim(SECONDS if self.is_in_etcd else 0.0)
        return journal, Table(journal)

    def end_lease(self) -> None:
        """What etcd does with a lease that is over."""
        if self._place is None:
            return
        with contextlib.closing(EtcdClient(self._place)) as client:
            look = etcd_client.transaction([], [etcd_client.get(f"{self._place.name}/leader")])
            until = time.monotonic() + SECONDS
            for leader in etcd_client.found_in(client.insist("kv/txn", look, until))[0]:
                client.insist("lease/revoke", {"ID": leader.lease}, until)

    def keys(self) -> list[str]:
        """The keys that are kept, as somebody sees them who does not lead."""
        if self._place is None:
            with contextlib.closing(sqlite3.connect(self.job_dir / JOURNAL_FILE)) as db:
                return sorted(key for (key,) in db.execute("SELECT key FROM keys"))
        with contextlib.closing(EtcdClient(self._place)) as client:
            return sorted(client.values(f"{self._place.name}/keys/", time.monotonic() + SECONDS))

    def claim_when_free(self, limit_seconds: float) -> int:
        """Lead as soon as the one before is known to lead no more; the generation."""
        until = time.monotonic() + SECONDS
        while True:
            try:
                return self.open().claim(limit_seconds)
            except LeaderLives:
                assert time.monotonic() < until
                time.sleep(0.1)

    def close(self) -> None:
        """Close all that was opened."""
        for journal in self._opened:
            journal.close()
