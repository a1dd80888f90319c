"""A cluster of etcd as it is asked over its JSON gateway, with a deadline for each try.

The gateway is a part of every etcd from 3.4 on and needs no more than HTTP, which is in the
standard library. One member is asked at a time and the next one where it does not answer: a call
that is under way when a member dies would otherwise hang. So every call may come twice, and whoever
makes one sees to it that this changes nothing. A cluster that is slow, on a disk that others use
too, gets more time from try to try: it would else be asked for ever and never heard.
"""

import base64
import http.client
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megatron_bamboo.membership.store_place import EtcdPlace

TRY_SECONDS, LONGEST_TRY_SECONDS = 1.0, 4.0
"""So long one member has for its answer: the first time, and where answers have been late."""
RETRY_SECONDS = 0.1
PAGE_KEYS = 1000
ORDERS = ("ASCEND", "DESCEND")
# gRPC's codes of what another try, or another member, may do better.
_PASSING = frozenset({1, 2, 4, 8, 10, 13, 14})
_TOO_LARGE = "larger than max"  # has the code of what is only exhausted for now


class EtcdAway(OSError):
    """Nobody answered, or nobody could do it now."""


class EtcdRefused(OSError):
    """etcd will not do it, however often it is asked."""


@dataclass(frozen=True, slots=True)
class Item:
    """A key with its value."""

    key: str
    value: bytes
    created: int
    """The revision in which it appeared."""
    modified: int
    """The revision of its newest value."""
    lease: str

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> "Item":
        """From what etcd says; it leaves out what is 0 or empty."""
        value = base64.b64decode(fields.get("value", ""))
        created, modified = (int(fields.get(f"{n}_revision", 0)) for n in ("create", "mod"))
        key = base64.b64decode(fields["key"]).decode()
        return cls(key, value, created, modified, fields.get("lease", "0"))


class EtcdClient:
    """The members of one cluster; for one thread."""

    def __init__(self, place: EtcdPlace) -> None:
        self._endpoints = place.endpoints
        self._tls = place.tls()
        self._asked = 0
        self._connection: http.client.HTTPConnection | None = None
        self._patience = TRY_SECONDS

    def try_once(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        """Ask one member; the next call asks another where it fails.

        Raises:
            EtcdAway: it did not answer, or could not do it now.
            EtcdRefused: none would do it.
        """
        began = time.monotonic()
        try:
            answer = self._ask(path, body, self._patience)
            self._patience = _patience_after(2 * (time.monotonic() - began))
            return answer
        except TimeoutError as error:
            waited, self._patience = self._patience, _patience_after(2 * self._patience)
            raise self._away(f"not within {waited:g} s") from error
        except EtcdAway:
            self._turn()
            raise
        except (OSError, http.client.HTTPException, ValueError) as error:
            if isinstance(error, EtcdRefused):
                raise
            raise self._away(str(error) or type(error).__name__) from error

    def insist(self, path: str, body: Mapping[str, Any], until: float) -> dict[str, Any]:
        """Ask members until one answers; EtcdAway at the monotonic time ``until``."""
        while True:
            try:
                return self.try_once(path, body)
            except EtcdAway:
                if time.monotonic() + RETRY_SECONDS > until:
                    raise
            time.sleep(RETRY_SECONDS)

    def values(
        self, prefix: str, until: float, revision: int = 0, first: str = ""
    ) -> dict[str, bytes]:
        """What the keys with a prefix hold at one moment, by the rest of their names.

        Args:
            revision: that moment; 0 for now.
            first: the rest of the first name that is wanted.
        """
        start, end, found = prefix + first, b64(_after(prefix)), dict[str, bytes]()
        while True:
            body = {"key": b64(start), "range_end": end, "limit": PAGE_KEYS, "revision": revision}
            reply = self.insist("kv/range", body, until)
            revision = revision or int(reply["header"]["revision"])
            page = [Item.of(fields) for fields in reply.get("kvs", [])]
            found |= {item.key.removeprefix(prefix): item.value for item in page}
            if not reply.get("more"):
                return found
            start = page[-1].key + "\0"

    def edge(self, prefix: str, order: str, until: float) -> str | None:
        """The first key with a prefix, in one of the ``ORDERS``; None if there is none."""
        body = {"key": b64(prefix), "range_end": b64(_after(prefix)), "limit": 1}
        sorting = {"sort_order": order, "sort_target": "KEY", "keys_only": True}
        found = self.insist("kv/range", body | sorting, until).get("kvs", [])
        return Item.of(found[0]).key if found else None

    def close(self) -> None:
        """End the connection."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _away(self, why: str) -> EtcdAway:
        """The member that was asked does not answer; the next one will be asked."""
        host, port = self._endpoints[self._asked]
        self._turn()
        return EtcdAway(f"etcd at {host}:{port} does not answer: {why}")

    def _turn(self) -> None:
        self.close()
        self._asked = (self._asked + 1) % len(self._endpoints)

    def _ask(self, path: str, body: Mapping[str, Any], seconds: float) -> dict[str, Any]:
        connection = self._connected(seconds)
        headers = {"Content-Type": "application/json"}
        connection.request("POST", f"/v3/{path}", json.dumps(body), headers)
        response = connection.getresponse()
        answer: dict[str, Any] = json.loads(response.read())
        if response.status != http.client.OK:
            _raise(answer, response.status)
        return answer

    def _connected(self, seconds: float) -> http.client.HTTPConnection:
        if self._connection is None:
            host, port = self._endpoints[self._asked]
            if self._tls is None:
                self._connection = http.client.HTTPConnection(host, port, timeout=seconds)
            else:
                self._connection = http.client.HTTPSConnection(
                    host, port, timeout=seconds, context=self._tls
                )
        self._connection.timeout = seconds
        if self._connection.sock is not None:
            self._connection.sock.settimeout(seconds)
        return self._connection


def _patience_after(seconds: float) -> float:
    """What a try may take where that much seems to be enough."""
    return min(max(TRY_SECONDS, seconds), LONGEST_TRY_SECONDS)


def b64(data: bytes | str) -> str:
    """As the gateway wants keys and values."""
    return base64.b64encode(data.encode() if isinstance(data, str) else data).decode()


def put(key: str, value: bytes, lease: str = "0") -> dict[str, Any]:
    """A part of a transaction: give a key a value."""
    return {"request_put": {"key": b64(key), "value": b64(value), "lease": lease}}


def get(key: str) -> dict[str, Any]:
    """A part of a transaction: ask for a key."""
    return {"request_range": {"key": b64(key)}}


def get_from(first: str, prefix: str) -> dict[str, Any]:
    """A part of a transaction: ask for keys with a prefix, from the first one on."""
    end = b64(_after(prefix))
    return {"request_range": {"key": b64(first), "range_end": end, "limit": PAGE_KEYS}}


def remove(key: str) -> dict[str, Any]:
    """A part of a transaction: remove a key."""
    return {"request_delete_range": {"key": b64(key)}}


def holds(key: str, value: bytes) -> dict[str, Any]:
    """A condition: a key has this value."""
    return {"key": b64(key), "target": "VALUE", "value": b64(value)}


def was_created(key: str, revision: int) -> dict[str, Any]:
    """A condition: a key is there since this revision; 0 for one that is not there."""
    return {"key": b64(key), "target": "CREATE", "create_revision": revision}


def is_unchanged(key: str, revision: int) -> dict[str, Any]:
    """A condition: a key has the value of this revision."""
    return {"key": b64(key), "target": "MOD", "mod_revision": revision}


def transaction(
    conditions: Sequence[Mapping[str, Any]],
    then: Sequence[Mapping[str, Any]],
    otherwise: Sequence[Mapping[str, Any]] = (),
) -> dict[str, Any]:
    """The body of a ``kv/txn``."""
    return {"compare": [*conditions], "success": [*then], "failure": [*otherwise]}


def found_in(reply: Mapping[str, Any]) -> list[list[Item]]:
    """What each question of a transaction has found."""
    ranges = (part.get("response_range") for part in reply.get("responses", []))
    return [
        [Item.of(fields) for fields in found.get("kvs", [])]
        for found in ranges
        if found is not None
    ]


def _after(prefix: str) -> str:
    """The first key behind all that begin with ``prefix``, which ends with a slash."""
    assert prefix.endswith("/"), prefix
    return f"{prefix[:-1]}0"


def _raise(answer: Mapping[str, Any], status: int) -> None:
    message = str(answer.get("message") or answer.get("error") or f"status {status}")
    is_passing = answer.get("code") in _PASSING and _TOO_LARGE not in message
    raise (EtcdAway if is_passing else EtcdRefused)(f"etcd says: {message}")
