"""The order of a job's times: what must be noticed comes before what must not give up till then."""

from dataclasses import dataclass

from megatron_bamboo.agent.job import Deadlines, JobShape
from megatron_bamboo.agent.leases import beat_seconds
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.signs import BEAT_SECONDS

# A lease is noticed to be over so much later at most.
NOTICE_SECONDS = 1.0
# A wait is told of after a lease, with the next sign of life, and must be told of for another one.
LEASES_TO_FIND_A_LINK = 2.25


@dataclass(frozen=True, slots=True)
class _Size:
    name: str
    seconds: float

    def __str__(self) -> str:
        return f"{self.name} ({self.seconds:g} s)"


def check_order(shape: JobShape, deadlines: Deadlines) -> None:
    """Refuse times that contradict each other.

    Raises:
        UserError: with the first rule that does not hold.
    """
    lease = shape.lease_seconds
    assert max(beat_seconds(lease), BEAT_SECONDS) <= lease / 3, "signs are too rare for a lease"
    silence = _Size("--bamboo-lease and a second", lease + NOTICE_SECONDS)
    group = _Size("--distributed-timeout-minutes", shape.group_timeout_seconds)
    link = _Size(
        f"{LEASES_TO_FIND_A_LINK:g} times --bamboo-lease and a second",
        LEASES_TO_FIND_A_LINK * lease + NOTICE_SECONDS,
    )
    first = _Size("half of --distributed-timeout-minutes", shape.group_timeout_seconds / 2)
    record = _Size("--record-deadline", deadlines.record_seconds)
    store = _Size("--store-deadline", deadlines.store_seconds)
    stall = _Size("--stall-limit", deadlines.stall_seconds)
    for shorter, longer, why in (
        (silence, first, "who waits for a worker must not give up before its hang is noticed"),
        (link, group, "who waits must not give up before a broken link is found"),
        (record, group, "who waits for a plan must not give up while records are gathered"),
        (silence, store, "a worker must not give up the store sooner than it is given up itself"),
        (group, stall, "a job must not end before the waits of its workers do"),
    ):
        if not shorter.seconds < longer.seconds:
            raise UserError(f"{shorter} must be less than {longer}: {why}")
