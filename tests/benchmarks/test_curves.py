"""What the loss-curve benchmark calls a deviation, and which it finds too large."""

from typing import Any

import pytest
from curves import Curve, StateDeviation, deviations, live_nodes, sample_complaints, state_rows
from orders import order_of


class Told:
    """A log of which only some events are asked for."""

    def __init__(self, **events: list[dict[str, Any]]) -> None:
        self._events = events

    def of(self, kind: str) -> list[dict[str, Any]]:
        return self._events.get(kind, [])

    def step_ends(self) -> dict[int, float]:
        return {1: 10.0, 2: 20.0}


WHOLE = {1: 5.0, 2: 4.0, 3: 3.0}
OTHERS = {1: 0.0, 2: 1e-7, 3: 1e-7}


def test_a_deviation_is_measured_by_that_of_the_other_orders_at_the_same_step() -> None:
    own = deviations({1: 5.0, 2: 4.0 - 2e-7, 3: 3.0 + 4e-7}, WHOLE)
    assert own == pytest.approx({1: 0.0, 2: 2e-7, 3: 4e-7})
    assert Curve(WHOLE, own, OTHERS).above() == [3]


def test_where_the_other_orders_agree_any_deviation_is_too_large() -> None:
    assert Curve(WHOLE, {1: 1e-9, 2: 0.0, 3: 0.0}, OTHERS).above() == [1]


def test_rows_tell_each_number_of_nodes_and_the_worst_of_their_steps() -> None:
    curve = Curve(WHOLE, {1: 0.0, 2: 1e-7, 3: 4e-7}, OTHERS)
    first, second = curve.rows(2, {1: 8, 2: 7, 3: 7})
    assert first == ("1 to 2", "8 7", "4.0000", "1.00e-07", "1.00e-07", "1.00", "0")
    assert second == ("3 to 3", "7", "3.0000", "4.00e-07", "1.00e-07", "4.00", "1")


def test_nodes_count_from_their_coming_to_their_loss() -> None:
    log = Told(
        agent_joined=[{"time": 1.0}, {"time": 2.0}, {"time": 12.0}],
        loss=[{"time": 5.0}],
        drained=[{"time": 30.0}],
    )
    assert live_nodes(log) == {1: 1, 2: 2}  # type: ignore[arg-type]


def read(step: int, attempt: int, pipeline: int, microbatch: int, sample: int) -> dict[str, Any]:
    place = {"step": step, "attempt": attempt, "pipeline": pipeline, "microbatch": microbatch}
    return {**place, "samples": [sample]}


def test_a_sample_counts_where_the_newest_attempt_read_it_however_many_did_so_there() -> None:
    first = [read(1, 0, pipeline, 0, pipeline) for pipeline in (0, 1)]
    again = [read(1, 3, 0, number, number) for number in (0, 1)]
    assert list(sample_complaints(Told(samples=[*first, *again, again[1]]), 1, 2)) == []  # type: ignore[arg-type]


def test_a_sample_in_two_places_or_in_none_is_complained_about() -> None:
    reads = [read(1, 0, 0, 0, 0), read(1, 0, 1, 0, 0)]
    (line,) = sample_complaints(Told(samples=reads), 1, 2)  # type: ignore[arg-type]
    assert line == "step 1 has the samples [0, 0]"


def test_tensors_are_measured_one_by_one() -> None:
    found = [
        StateDeviation("layer0/weight/exp_avg", 2e-8, 1e-8),
        StateDeviation("layer1/weight/exp_avg", 4e-8, 1e-8),
        StateDeviation("layer0/weight/parameter", 0.0, 0.0),
    ]
    assert list(state_rows(found)) == [
        ("parameter", "1", "0.00e+00", "0.00e+00", "0.00", "0"),
        ("exp_avg", "2", "4.00e-08", "1.00e-08", "4.00", "1"),
    ]


def test_each_step_has_an_order_of_its_own_by_the_seed() -> None:
    orders = {order_of(seed, step, 8) for seed in (1, 2) for step in (1, 2)}
    assert len(orders) == 4 and order_of(1, 1, 8) in orders
    assert all(sorted(order) == list(range(8)) for order in orders)
