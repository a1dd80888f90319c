"""What a worker holds is compared between times in which the job was whole."""

from typing import Any

import pytest

from megatron_bamboo.rehearsal.leaks import KINDS, STEPS_TO_SETTLE, leak_complaints
from megatron_bamboo.rehearsal.record import Events

WHOLE = {"stages": ["node0", "node1"], "replicas": ["node1", "node0"]}
MERGED = {"stages": ["node0", "node0"], "replicas": ["node1", "node1"]}
Fields = dict[str, Any]


def held(time: float, number: int) -> Fields:
    return {"event": "resources", "source": "node0", "time": time} | dict.fromkeys(KINDS, number)


def at(kind: str, time: float, **fields: Any) -> Fields:
    return {"event": kind, "source": "coordinator", "time": time, **fields}


def run(*numbers: int, pipeline: Fields = WHOLE, settled: int = 1) -> Events:
    """A job that is made whole again and again, with what node0 holds each time."""
    events = [held(1.0, 99)]
    for time, number in enumerate(numbers, start=1):
        start = 100.0 * time
        events += [
            at("loss", start),
            held(start + 1, 1),
            at("changed", start + 2, pipelines=[pipeline]),
        ]
        events += [held(start + 3 + n, number + 7) for n in range(STEPS_TO_SETTLE)]
        events += [held(start + 50 + n, number) for n in range(settled)]
    return Events(events)


@pytest.mark.parametrize("numbers", [(25, 25, 25), (25,), (25, 26, 24), ()])
def test_no_leak(numbers: tuple[int, ...]) -> None:
    assert list(leak_complaints(run(*numbers))) == []


def test_more_after_later_losses_is_a_leak() -> None:
    found = list(leak_complaints(run(25, 25, 26)))
    assert found[0] == "node0 held 25 threads after a loss, and 26 after later ones"
    assert len(found) == len(KINDS)


def test_only_times_in_which_the_job_is_whole_count() -> None:
    assert list(leak_complaints(run(25, 26, pipeline=MERGED))) == []


def test_a_time_too_short_to_settle_tells_nothing() -> None:
    assert list(leak_complaints(run(25, 26, settled=0))) == []
