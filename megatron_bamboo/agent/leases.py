"""Who was heard of lately: each node's lease, as the coordinator grants it.

A dead process closes its connections, but a stopped node or a silent network does not. So each
agent says that it is there, again and again, and a node that has said nothing for the length of a
lease is lost. A renewal must repeat the word of the coordinator's last answer: a node that can
send but not hear would otherwise live for ever and follow no plan. The time is counted here, from
receiving, and no clocks of two machines are compared.
"""

import secrets
from collections.abc import Callable
from dataclasses import dataclass

from megatron_bamboo.membership.clock import PatientClock, boot_time

BEATS_PER_LEASE = 4.0
FIRST_WORD = ""


def beat_seconds(lease_seconds: float) -> float:
    """How often an agent says that it is there."""
    return lease_seconds / BEATS_PER_LEASE


@dataclass(slots=True)
class _Lease:
    renewed: float
    word: str


class Leases:
    """The leases of all nodes that have joined and are not lost."""

    def __init__(self, seconds: float, now: Callable[[], float] = boot_time) -> None:
        self.seconds = seconds
        self._clock = PatientClock(now)
        self._leases: dict[str, _Lease] = {}

    def grant(self, node: str) -> None:
        """A node has joined; its first renewal repeats ``FIRST_WORD``."""
        self._leases[node] = _Lease(self._clock.look(), FIRST_WORD)

    def end(self, node: str) -> None:
        """A node needs no lease any more."""
        self._leases.pop(node, None)

    def renew(self, node: str, word: str) -> str | None:
        """Renew a node's lease if the word is that of the last answer.

        Returns what to answer: a new word, or the last one again; None for a node without a lease.
        """
        lease = self._leases.get(node)
        if lease is None:
            return None
        if word == lease.word:
            lease.renewed, lease.word = self._clock.look(), secrets.token_hex(8)
        return lease.word

    def silent(self) -> dict[str, float]:
        """The nodes whose lease is over, with the seconds since it was renewed."""
        now = self._clock.look()
        ages = {node: now - lease.renewed for node, lease in self._leases.items()}
        return {node: age for node, age in ages.items() if age > self.seconds}
