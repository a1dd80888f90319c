"""The office of a job's coordinator in etcd: a key with a lease, which one holds at a time.

Whoever wants to lead next, on whatever host, waits until etcd has let the key go. The time of the
lease is counted here from sending, with a tenth as margin for clocks that do not run alike: so its
holder stops speaking for the job before etcd could have another one.
"""

import contextlib
import json
import math
import os
import secrets
import socket
import time
from dataclasses import asdict, dataclass
from typing import Any, Self

from megatron_bamboo.membership import etcd_client as etcd
from megatron_bamboo.membership.clock import boot_time
from megatron_bamboo.membership.etcd_client import EtcdClient, Item
from megatron_bamboo.membership.leadership import (
    Deposed,
    LeaderLives,
    machine_name,
    started_at,
)

SHORTEST_LEASE_SECONDS = 2
RENEWALS_PER_LEASE = 4.0
_LEASE_SHARE = 0.9


@dataclass(frozen=True, slots=True)
class Holder:
    """Who holds the office: the value of ``leader`` while it does, and of ``led`` afterwards."""

    generation: int
    machine: str
    host: str
    pid: int
    started: int
    lease_seconds: int
    token: str
    """Tells a claim that was not answered, and has come through, from any other."""

    @classmethod
    def this_process(cls, generation: int, lease_seconds: int) -> Self:
        """As this process would hold it."""
        pid, host, token = os.getpid(), socket.gethostname(), secrets.token_hex(8)
        return cls(generation, machine_name(), host, pid, started_at(pid), lease_seconds, token)

    def to_json(self) -> bytes:
        """The value."""
        return json.dumps(asdict(self)).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """What ``to_json`` wrote."""
        return cls(**json.loads(text))

    @property
    def is_dead(self) -> bool:
        """Whether its process was one of this machine's, and is gone."""
        return self.machine == machine_name() and started_at(self.pid) != self.started

    def __str__(self) -> str:
        return f"coordinator {self.generation} (process {self.pid} of {self.host})"


class Office:
    """One process's time in office, or its wish for it.

    Args:
        root: what all of the job's keys begin with.
    """

    def __init__(self, client: EtcdClient, root: str) -> None:
        self._client = client
        self._root = root
        self.generation = 0
        """0 before the office was held."""
        self.renew_at = math.inf
        """When the lease is to be renewed next."""
        self._created = 0
        self._lease = ""
        self._until = 0.0

    def claim(self, lease_seconds: float, until: float) -> None:
        """Hold the office from now on.

        Args:
            lease_seconds: how long etcd waits for a sign of life.
            until: how long an etcd that answers is looked for, by the monotonic clock.

        Raises:
            LeaderLives: another one holds it.
            EtcdAway: nobody has answered until then.
        """
        self._look_for_another(until)
        seconds = max(SHORTEST_LEASE_SECONDS, math.ceil(lease_seconds))
        sent = boot_time()
        granted = self._client.insist("lease/grant", {"TTL": str(seconds)}, until)
        self._lease = granted["ID"]
        self._count(sent, int(granted["TTL"]))
        try:
            while not self._try_to_claim(seconds, until):
                time.sleep(etcd.RETRY_SECONDS)
        except LeaderLives:
            self.give_up()
            raise

    def is_certain(self) -> bool:
        """Whether nobody else can hold the office now."""
        return boot_time() < self._until

    def condition(self) -> dict[str, Any]:
        """What holds of the keys as long as the office is held."""
        return etcd.was_created(f"{self._root}leader", self._created)

    def look(self) -> dict[str, Any]:
        """A part of a transaction: ask for the holder."""
        return etcd.get(f"{self._root}leader")

    def renew(self) -> None:
        """Show etcd that the holder lives; Deposed where it is too late."""
        sent = boot_time()
        reply = self._client.try_once("lease/keepalive", {"ID": self._lease})
        seconds = int(reply.get("result", {}).get("TTL", 0))
        if seconds <= 0:
            raise self.deposed([])
        self._count(sent, seconds)

    def give_up(self) -> None:
        """Let somebody else have it at once; the lease ends by itself, too."""
        with contextlib.suppress(OSError):
            self._client.try_once("lease/revoke", {"ID": self._lease})

    def is_held_by(self, found: list[Item]) -> bool:
        """Whether what ``look`` has found says that this one still holds it."""
        return bool(found) and found[0].created == self._created

    def deposed(self, found: list[Item]) -> Deposed:
        """Why this one holds it no more, by what ``look`` has found."""
        why = f"{Holder.from_json(found[0].value)} leads" if found else "its lease is over"
        return Deposed(f"coordinator {self.generation} is deposed: {why}")

    def _count(self, sent: float, seconds: int) -> None:
        self._until = sent + _LEASE_SHARE * seconds
        self.renew_at = sent + seconds / RENEWALS_PER_LEASE

    def _try_to_claim(self, lease_seconds: int, until: float) -> bool:
        """Whether this one holds it now; False where another look is needed."""
        leader = f"{self._root}leader"
        dead, known = self._look_for_another(until)
        revision, last = (0, 0) if known is None else (known.modified, int(known.value))
        unclaimed = etcd.is_unchanged(f"{self._root}generation", revision)
        if dead is not None:
            unchanged = etcd.is_unchanged(leader, dead.modified)
            removal = etcd.transaction([unchanged, unclaimed], [etcd.remove(leader)])
            self._client.insist("kv/txn", removal, until)
            return False
        mine = Holder.this_process(last + 1, lease_seconds)
        conditions = [etcd.was_created(leader, 0), unclaimed]
        self._client.insist("kv/txn", etcd.transaction(conditions, self._claims(mine)), until)
        # Of a claim that came twice, the first one may have been taken.
        reply = self._client.insist("kv/txn", etcd.transaction([], [self.look()]), until)
        (holders,) = etcd.found_in(reply)
        if not holders or holders[0].value != mine.to_json():
            return False
        self.generation, self._created = mine.generation, holders[0].created
        return True

    def _look_for_another(self, until: float) -> tuple[Item | None, Item | None]:
        """The key of a holder that is known to be dead, and that of the newest generation;
        LeaderLives where one may live."""
        looks = [self.look(), etcd.get(f"{self._root}generation")]
        reply = self._client.insist("kv/txn", etcd.transaction([], looks), until)
        holders, generations = etcd.found_in(reply)
        for found in holders:
            holder = Holder.from_json(found.value)
            if not holder.is_dead:
                raise LeaderLives(f"{holder} leads")
        return (*holders, None)[0], (*generations, None)[0]

    def _claims(self, mine: Holder) -> list[dict[str, Any]]:
        return [
            etcd.put(f"{self._root}leader", mine.to_json(), self._lease),
            etcd.put(f"{self._root}led", mine.to_json()),
            etcd.put(f"{self._root}generation", str(mine.generation).encode()),
            etcd.put(f"{self._root}written", writing(mine.generation)),
        ]


def writing(generation: int, number: int = 0) -> bytes:
    """The value of ``written`` after so many transactions of a coordinator."""
    return f"{generation}:{number}".encode()
