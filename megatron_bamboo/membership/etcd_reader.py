"""A job's keys in etcd as the launcher and those see them who only watch.

They change nothing and ask nothing of the coordinator.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Sequence
from typing import Any

from megatron_bamboo.membership import etcd_client as etcd
from megatron_bamboo.membership.address import ADDRESS_KEY
from megatron_bamboo.membership.clock import boot_time
from megatron_bamboo.membership.etcd_client import EtcdAway, EtcdClient, Item
from megatron_bamboo.membership.etcd_journal import fact_key, in_order
from megatron_bamboo.membership.etcd_office import Holder
from megatron_bamboo.membership.leadership import Leader, News
from megatron_bamboo.membership.store_place import EtcdPlace

SNAPSHOT_SECONDS = 5.0
OUTCOME = "keys/outcome"
ENDED = "ended"
"""Below a job's name: what its coordinator says of its end, and its launcher where none could."""


class EtcdReader:
    """What is new, for the launcher."""

    def __init__(self, place: EtcdPlace) -> None:
        self._client = EtcdClient(place)
        self._root = f"{place.name}/"
        self._number = 0
        self._leader: Leader | None = None

    def look(self) -> News:
        """What is there, and new."""
        facts: list[Item] = []
        try:
            while len(page := self._look()) == etcd.PAGE_KEYS:
                facts += page
            facts += page
        except EtcdAway:
            # What was read before is told all the same.
            return News(self._leader, _told(facts), is_away=True)
        return News(self._leader, _told(facts))

    def _look(self) -> list[Item]:
        """Take the newest leader, and what was said since the last look, or a page of it."""
        root = self._root
        facts = etcd.get_from(fact_key(root, self._number + 1), f"{root}said/")
        looks = [etcd.get(f"{root}leader"), etcd.get(f"{root}led"), facts]
        reply = self._client.try_once("kv/txn", etcd.transaction([], looks))
        leaders, led, said = etcd.found_in(reply)
        if led:
            self._leader = self._seen(Holder.from_json(led[0].value), bool(leaders))
        if said:
            self._number = int(said[-1].key.rpartition("/")[2])
        return said

    def _seen(self, holder: Holder, is_held: bool) -> Leader:
        """The newest leader: while it holds the office it shows that it lives."""
        before = self._leader
        if is_held or before is None or before.generation != holder.generation:
            return _leader_of(holder, boot_time())
        return before


class EtcdSnapshot:
    """What etcd holds of a job at one moment."""

    def __init__(self, client: EtcdClient, root: str) -> None:
        self._client = client
        self._root = root
        self._until = time.monotonic() + SNAPSHOT_SECONDS
        looks = [etcd.get(f"{root}leader"), etcd.get(f"{root}led")]
        reply = client.insist("kv/txn", etcd.transaction([], looks), self._until)
        self._revision = int(reply["header"]["revision"])
        self._leaders, self._led = etcd.found_in(reply)

    @property
    def is_there(self) -> bool:
        """Whether anyone has led the job."""
        return bool(self._led)

    @property
    def is_led(self) -> bool:
        """Whether somebody holds the office, dead or alive."""
        return bool(self._leaders)

    def leader(self) -> Leader | None:
        """Who leads, or led last; None before anyone has."""
        if not self._led:
            return None
        holder = Holder.from_json(self._led[0].value)
        return _leader_of(holder, boot_time() - self._silent_seconds(holder))

    def get(self, key: str) -> bytes | None:
        """The value of a key, None while it has none."""
        body = {"key": etcd.b64(f"{self._root}keys/{key}"), "revision": self._revision}
        found = self._client.insist("kv/range", body, self._until).get("kvs", [])
        return Item.of(found[0]).value.partition(b"\n")[2] if found else None

    def items(self, prefix: str) -> dict[str, bytes]:
        """The keys that begin with ``prefix``, with their values, oldest first."""
        start = f"{self._root}keys/{prefix}"
        values = self._client.values(start, self._until, self._revision)
        return {f"{prefix}{rest}": value for rest, _, value in in_order(values)}

    def facts(self, after: int) -> tuple[int, tuple[dict[str, Any], ...]]:
        """What was said after the fact of a number (0: all); with the number of the newest."""
        root, first = f"{self._root}said/", fact_key("", after + 1).removeprefix("said/")
        # A long job has said more than can be read again at each look.
        values = self._client.values(root, self._until, self._revision, first)
        new = {int(number): text for number, text in values.items()}
        return max(new, default=after), tuple(map(json.loads, new.values()))

    def _silent_seconds(self, holder: Holder) -> float:
        """How old the last sign of life is; of one that etcd has let go only the least is known."""
        if not self._leaders:
            return holder.lease_seconds
        body = {"ID": self._leaders[0].lease}
        lease = self._client.insist("lease/timetolive", body, self._until)
        return max(0.0, int(lease.get("grantedTTL", 0)) - int(lease.get("TTL", 0)))


@contextlib.contextmanager
def etcd_snapshot(place: EtcdPlace) -> Iterator[EtcdSnapshot | None]:
    """What is there at this moment; None before anyone has led.

    Raises:
        EtcdAway: no etcd answers.
    """
    with contextlib.closing(EtcdClient(place)) as client:
        store = EtcdSnapshot(client, f"{place.name}/")
        yield store if store.is_there else None


class Bulletin:
    """What whoever has no other way to a job must know: where it is led, and how it has ended."""

    def __init__(self, place: EtcdPlace) -> None:
        self._client = EtcdClient(place)
        self._keys = [f"{place.name}/{key}" for key in (f"keys/{ADDRESS_KEY}", OUTCOME, ENDED)]

    def look(self) -> tuple[bytes | None, bytes | None]:
        """The newest address and the outcome, None while there is none.

        Raises:
            EtcdAway: it does not answer now.
        """
        looks = etcd.transaction([], [etcd.get(key) for key in self._keys])
        found = etcd.found_in(self._client.try_once("kv/txn", looks))
        address, known, ended = (items[0].value if items else None for items in found)
        return _without_head(address), _without_head(known) or ended

    def post_end(self, outcome: bytes) -> None:
        """Say how a job has ended whose coordinators could not."""
        self._client.try_once("kv/txn", etcd.transaction([], [etcd.put(self._keys[2], outcome)]))

    def close(self) -> None:
        """End the connection."""
        self._client.close()


def _without_head(value: bytes | None) -> bytes | None:
    return None if value is None else value.partition(b"\n")[2]


def _told(facts: Sequence[Item]) -> tuple[dict[str, Any], ...]:
    return tuple(json.loads(fact.value) for fact in facts)


def _leader_of(holder: Holder, beat: float) -> Leader:
    return Leader(holder.generation, holder.pid, holder.started, beat, holder.machine)
