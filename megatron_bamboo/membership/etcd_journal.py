"""What a job knows, in etcd: for clusters that must survive the loss of any machine.

The same as the journal on disk (``journal.py``), and the same rules: one coordinator leads, and
each of its writes is one transaction that looks whether it still does (``etcd_office.py``).

Writes do not hold up the coordinator. A thread keeps them in their order, several in one
transaction where many come at a time, and nobody gets an answer before all is kept that it may rest
on (``kept``). While etcd is away nothing is answered, and nothing is lost.
"""

import asyncio
import concurrent.futures
import contextlib
import json
import math
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from megatron_bamboo.membership import etcd_client as etcd
from megatron_bamboo.membership.clock import boot_time
from megatron_bamboo.membership.etcd_client import EtcdAway, EtcdClient, EtcdRefused
from megatron_bamboo.membership.etcd_office import Office, writing
from megatron_bamboo.membership.leadership import Deposed, Hooks
from megatron_bamboo.membership.store_place import EtcdPlace
from megatron_bamboo.membership.table import Answered, Change, Put, Removed, Said

PATIENCE_SECONDS = 600.0
"""So long an etcd that answers is looked for by a coordinator that has nothing else to do."""
MOST_FACTS = 1_000_000
"""Of what was said only the newest is kept."""
# etcd takes no more than 128 operations and 1.5 MiB in one transaction unless it is told to.
_MOST_OPERATIONS = 100
_MOST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class _Batch:
    """Writes that are kept together."""

    writes: dict[str, bytes | None]
    keys: list[str]
    """Of the table, that get values."""

    def num_bytes(self) -> int:
        return sum(len(key) + len(value or b"") for key, value in self.writes.items())


class EtcdJournal:
    """A job's keys in etcd as its leader uses them, and whoever wants to be."""

    def __init__(self, place: EtcdPlace, hooks: Hooks | None = None) -> None:
        self._place = place
        self._root = f"{place.name}/"
        self._client = EtcdClient(place)
        self._office = Office(self._client, self._root)
        self._hooks = Hooks() if hooks is None else hooks
        self._heads: dict[str, dict[str, Any]] = {}
        self._num_places = 0
        self._num_facts, self._oldest_fact = 0, 1
        self._batches: deque[_Batch] = deque()
        self._num_tried = 0
        """How many of them the newest write has that was not answered: it may have come through, so
        it is sent again as it was."""
        self._num_kept = self._num_written = 0
        self._waiting: list[tuple[int, concurrent.futures.Future[None]]] = []
        self._failure: Exception | None = None
        self._news = threading.Condition()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="etcd", daemon=True)

    @property
    def generation(self) -> int:
        """This leader's own; 0 before it has claimed any."""
        return self._office.generation

    def claim(self, limit_seconds: float) -> int:
        """Lead from now on; the generation.

        Args:
            limit_seconds: how old this leader's last sign of life may become.

        Raises:
            LeaderLives: another one leads, or etcd has not let it go yet.
        """
        self._office.claim(limit_seconds, time.monotonic() + PATIENCE_SECONDS)
        self._thread.start()
        return self.generation

    def load(self) -> Iterable[Change]:
        """What makes the table as it was."""
        until = time.monotonic() + PATIENCE_SECONDS
        with contextlib.closing(EtcdClient(self._place)) as client:
            facts = [client.edge(f"{self._root}said/", order, until) for order in etcd.ORDERS]
            if facts[0] is not None and facts[1] is not None:
                self._oldest_fact, self._num_facts = map(_number_of, (facts[0], facts[1]))
            keys = client.values(f"{self._root}keys/", until)
        for key, head, value in in_order(keys):
            self._heads[key], self._num_places = head, head["place"]
            yield Put(key, value)
            for request, total in head.get("answers", {}).items():
                yield Answered(key, request, total)

    def keep(self, changes: Sequence[Change]) -> None:
        """Take some changes, to be kept together and after all others before them; Deposed where
        that is known to be in vain."""
        self.check()
        batch = _Batch({}, [change.key for change in changes if isinstance(change, Put)])
        self._hooks.before(batch.keys)
        for change in changes:
            self._add(batch.writes, change)
        while self._num_facts - self._oldest_fact >= MOST_FACTS:
            batch.writes[fact_key(self._root, self._oldest_fact)] = None
            self._oldest_fact += 1
        with self._news:
            self._batches += _divided(batch)
            self._news.notify_all()

    def check(self) -> None:
        """Make sure that nothing is known of another leader."""
        if self._failure is not None:
            if self._hooks.failed is not None:
                self._hooks.failed(self._failure)
            raise self._failure

    async def kept(self) -> None:
        """Wait until all that was given is kept, and this one leads beyond doubt."""
        if (waiting := self._wait_for()) is not None:
            await asyncio.wrap_future(waiting)
        self.check()

    def flush(self, seconds: float = PATIENCE_SECONDS) -> None:
        """The same for who does not run in an event loop; EtcdAway when the time is over."""
        if (waiting := self._wait_for()) is not None:
            try:
                waiting.result(seconds)
            except TimeoutError:
                raise EtcdAway(f"etcd has kept nothing for {seconds:g} s") from None
        self.check()

    def beat(self) -> None:
        """Show that the leader lives: that is what its thread does."""
        self.check()

    @contextlib.contextmanager
    def leading(self) -> Iterator[None]:
        """Within it nobody else can begin to lead, as long as it is short; Deposed if another
        does already."""
        self.flush()
        yield

    def close(self) -> None:
        """Let somebody else lead, after all is kept that can be."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()
        if self._thread.ident is not None:
            self._thread.join()
            if self._failure is None:
                self._office.give_up()
        self._client.close()

    def _add(self, writes: dict[str, bytes | None], change: Change) -> None:
        match change:
            case Put(key, value):
                if key not in self._heads:
                    self._num_places += 1
                    self._heads[key] = {"place": self._num_places}
                self._write_key(writes, key, value)
            case Answered(key, request, total):
                self._heads[key].setdefault("answers", {})[request] = total
                self._write_key(writes, key, str(total).encode())
            case Removed(key):
                self._heads.pop(key, None)
                writes[f"{self._root}keys/{key}"] = None
            case Said(text):
                self._num_facts += 1
                writes[fact_key(self._root, self._num_facts)] = text.encode()

    def _write_key(self, writes: dict[str, bytes | None], key: str, value: bytes) -> None:
        """Above a value stands when its key first had one, and to whom it was an answer."""
        head = json.dumps(self._heads[key]).encode()
        writes[f"{self._root}keys/{key}"] = head + b"\n" + value

    def _wait_for(self) -> "concurrent.futures.Future[None] | None":
        """What ends when all is kept that was given until now; None if it is."""
        with self._news:
            is_kept = not self._batches and self._office.is_certain()
            if is_kept or self._failure is not None:
                return None
            waiting = concurrent.futures.Future[None]()
            self._waiting.append((self._num_kept + len(self._batches), waiting))
            return waiting

    def _release(self) -> None:
        """Let those go on that wait for no more than what is kept, if this one surely leads."""
        if self._failure is None and not self._office.is_certain():
            return
        num_kept = self._num_kept if self._failure is None else math.inf
        due = [future for number, future in self._waiting if number <= num_kept]
        self._waiting = [waits for waits in self._waiting if waits[0] > num_kept]
        for future in due:
            if future.set_running_or_notify_cancel():
                future.set_result(None)

    def _run(self) -> None:
        """Keep what is given, and the office, until it is closed or another one leads."""
        is_away = False
        while True:
            try:
                if not self._work():
                    return
                is_away = False
            except EtcdAway as error:
                if self._is_closed:
                    return
                if not is_away:
                    sys.stderr.write(f"the store is away: {error}\n")
                is_away = True
                time.sleep(etcd.RETRY_SECONDS)
            except (Deposed, EtcdRefused) as error:
                with self._news:
                    self._failure = error
                    self._release()
                if self._hooks.failed is not None:
                    self._hooks.failed(error)
                return

    def _work(self) -> bool:
        """Do what is due next; False if nothing ever will be."""
        with self._news:
            self._release()
            while not self._batches and (left := self._office.renew_at - boot_time()) > 0:
                if self._is_closed:
                    return False
                self._news.wait(left)
            tried = [*islice(self._batches, self._num_tried)]
            batches = tried or _that_fit_together(self._batches)
        if boot_time() >= self._office.renew_at:
            self._office.renew()
        else:
            self._write(batches)
        return True

    def _write(self, batches: Sequence[_Batch]) -> None:
        """Write some batches in one transaction, if this one leads and they are next.

        A try that was not answered may have come through, or still come through when others have:
        each has a number, and is taken only as the next one.
        """
        name, generation = f"{self._root}written", self.generation
        before, after = (writing(generation, self._num_written + n) for n in (0, 1))
        writes: dict[str, bytes | None] = {name: after}
        for batch in batches:
            writes |= batch.writes
        parts = [etcd.remove(k) if v is None else etcd.put(k, v) for k, v in writes.items()]
        conditions = [self._office.condition(), etcd.holds(name, before)]
        body = etcd.transaction(conditions, parts, [self._office.look(), etcd.get(name)])
        self._num_tried = len(batches)
        reply = self._client.try_once("kv/txn", body)
        if not reply.get("succeeded"):
            holders, (written,) = etcd.found_in(reply)
            if not self._office.is_held_by(holders):
                raise self._office.deposed(holders)
            assert written.value == after, f"{written.value!r} is neither {before!r} nor {after!r}"
        with self._news:
            self._num_tried = 0
            self._num_written += 1
            self._num_kept += len(batches)
            for _ in batches:
                self._batches.popleft()
        for batch in batches:
            self._hooks.after(batch.keys)


def fact_key(root: str, number: int) -> str:
    """Where something stands that was said, in the order in which it was."""
    return f"{root}said/{number:020d}"


def in_order(values: dict[str, bytes]) -> list[tuple[str, dict[str, Any], bytes]]:
    """Keys, with what stands above their values, and those: first what had a value first."""
    parts = [(key, *value.partition(b"\n")[::2]) for key, value in values.items()]
    found = [(key, json.loads(head), value) for key, head, value in parts]
    return sorted(found, key=lambda item: int(item[1]["place"]))


def _number_of(key: str) -> int:
    return int(key.rpartition("/")[2])


def _divided(batch: _Batch) -> list[_Batch]:
    """A batch as etcd takes it: where there are many removals they follow in batches of their own.

    What is removed is of no use to anybody any more, so it may be so a moment later.
    """
    if len(batch.writes) <= _MOST_OPERATIONS:
        return [batch]
    removals = [key for key, value in batch.writes.items() if value is None]
    first: dict[str, bytes | None] = {
        key: value for key, value in batch.writes.items() if value is not None
    }
    parts = [_Batch(first, batch.keys)] if first else []
    for n in range(0, len(removals), _MOST_OPERATIONS):
        parts.append(_Batch(dict.fromkeys(removals[n : n + _MOST_OPERATIONS]), []))
    return parts


def _that_fit_together(batches: Iterable[_Batch]) -> list[_Batch]:
    """The first ones that one transaction may hold: one at least, if there is any."""
    chosen: list[_Batch] = []
    num_operations = num_bytes = 0
    for batch in batches:
        num_operations += len(batch.writes)
        num_bytes += batch.num_bytes()
        if chosen and (num_operations > _MOST_OPERATIONS or num_bytes > _MOST_BYTES):
            break
        chosen.append(batch)
    return chosen
