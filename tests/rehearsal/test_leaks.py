"""What a worker holds is compared between times in which the job was whole."""

from typing import Any

import pytest

from megatron_bamboo.rehearsal.leaks import KINDS, STEPS_TO_SETTLE, leak_complaints
from megatron_bamboo.rehearsal.record import Events

WHOLE = {"stages": ["node0", "node1"], "replicas": ["node1", "node0"]}
MERGED = {"stages": ["node0", "node0"], "replicas": ["node1", "node1"]}
Fields = dict[str, Any]
TIMEOUT_SECONDS = 90.0  # the times that are made here are 100 s apart


def held(time: float, number: int) -> Fields:
    place = {"source": "node0", "time": time, "pipeline": 0}
    return {"event": "resources", **place} | dict.fromkeys(KINDS, number)


def at(kind: str, time: float, **fields: Any) -> Fields:
    return {"event": kind, "source": "coordinator", "time": time, **fields}


def made_whole(
    start: float, number: int, hit: int = 0, pipeline: Fields = WHOLE, settled: int = 1
) -> list[Fields]:
    """A loss in a pipeline, a change soon after, and what node0 holds then."""
    return [
        *(at("loss", start), at("takeover", start + 1, pipeline=hit), held(start + 2, 1)),
        at("changed", start + 3, pipelines=[pipeline]),
        *(held(start + 4 + n, number + 7) for n in range(STEPS_TO_SETTLE)),
        *(held(start + 50 + n, number) for n in range(settled)),
    ]


def leaks(*times: list[Fields], timeout_seconds: float = TIMEOUT_SECONDS) -> list[str]:
    events = [held(1.0, 99), *(event for time in times for event in time)]
    return list(leak_complaints(Events(events), timeout_seconds))


@pytest.mark.parametrize(
    "numbers", [(25, 25, 25), (25,), (25, 26, 24), (25, 25, 29), (25, 29, 29, 25), (25, 29), ()]
)
def test_no_leak(numbers: tuple[int, ...]) -> None:
    assert leaks(*(made_whole(100.0 * n, number) for n, number in enumerate(numbers, 1))) == []


@pytest.mark.parametrize("numbers", [(25, 27, 26), (25, 25, 27, 26)])
def test_more_for_longer_than_an_operation_may_take_is_a_leak(numbers: tuple[int, ...]) -> None:
    times = [made_whole(100.0 * n, number) for n, number in enumerate(numbers, 1)]
    found = leaks(*times)
    assert found[0] == "node0 held 25 threads after a loss, and 26 after later ones"
    assert len(found) == len(KINDS)
    assert leaks(*times, timeout_seconds=110) == []


def test_what_is_away_for_a_moment_is_not_what_was_held() -> None:
    """As the connection to a coordinator that is gone."""
    first = made_whole(100.0, 25, settled=9)
    first.insert(-2, held(157.5, 24))
    assert leaks(first, made_whole(200.0, 25), made_whole(300.0, 25)) == []


def test_only_times_in_which_the_job_is_whole_count() -> None:
    merged = [made_whole(100.0 * n, 25 + n, pipeline=MERGED) for n in range(1, 5)]
    assert leaks(*merged) == []


def test_the_first_loss_of_another_pipeline_tells_nothing() -> None:
    later = [made_whole(100.0 * n, 25) for n in range(2, 5)]
    assert leaks(made_whole(100, 24, hit=1), *later) == []


def test_who_has_joined_after_a_loss_has_seen_none() -> None:
    """Its own first takeover needs what it had not needed before."""
    times = [made_whole(100.0 * n, number) for n, number in enumerate((24, 25, 25, 25), 1)]
    late = [e for time in times for e in time if e["event"] != "resources" or e["time"] > 103]
    assert list(leak_complaints(Events(late), TIMEOUT_SECONDS)) == []
    assert list(leak_complaints(Events([held(1.0, 99), *late]), TIMEOUT_SECONDS)) != []


def test_a_time_too_short_to_settle_tells_nothing() -> None:
    short = [made_whole(100.0 * n, 26, settled=0) for n in range(2, 5)]
    assert leaks(made_whole(100, 25), *short) == []
