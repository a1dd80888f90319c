import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.costs import Costs

seconds = st.floats(1e-6, 1e6)
of_stages = st.lists(
    st.one_of(seconds, st.lists(seconds, min_size=1, max_size=3).map(tuple)), min_size=1, max_size=4
).map(tuple)
costs = st.builds(
    Costs, st.one_of(seconds, of_stages), st.one_of(seconds, of_stages), st.floats(0, 1e3)
)


@given(costs)
def test_json_reads_back(given_costs: Costs) -> None:
    assert Costs.from_json(given_costs.to_json()) == given_costs


@pytest.mark.parametrize(
    ("text", "seconds_of"),
    [
        ('{"forward": 1, "backward": 2}', {"1.0F0": 1, "1.1RF0": 1, "0.1B3": 2, "1.0SEND_F0": 0}),
        ('{"forward": [1, 3], "backward": 2}', {"0.1F0": 1, "1.0F0": 3, "1.1F2": 3}),
        ('{"forward": [1, [3, 4]], "backward": [5, 6]}', {"0.1F0": 1, "1.1F2": 4, "1.0B1": 6}),
    ],
)
def test_costs_are_for_all_by_stage_or_by_chunk(text: str, seconds_of: dict[str, float]) -> None:
    given_costs = Costs.from_json(text)
    shown = {action: given_costs.of(Action.parse(action)) for action in seconds_of}
    assert shown == seconds_of


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "not JSON"),
        ("[1, 2]", "costs are an object like"),
        ('{"forward": 1}', "costs are an object like"),
        ('{"forward": 1, "backward": 2, "send": 3}', "costs are an object like"),
        ('{"forward": "1", "backward": 2}', 'forward has "1" where a number is due'),
        ('{"forward": true, "backward": 2}', "forward has true where"),
        ('{"forward": [], "backward": 2}', r"forward has \[\] where"),
        ('{"forward": [[[1]]], "backward": 2}', r"forward has \[1.0\] where"),
        ('{"forward": 1, "backward": [2, null]}', "backward has null where"),
        ('{"forward": 0, "backward": 2}', "each must be above 0"),
        ('{"forward": [1, [2, -1]], "backward": 2}', "each must be above 0"),
        ('{"forward": 1, "backward": NaN}', "each must be above 0 and finite"),
        ('{"forward": 1e999, "backward": 1}', "each must be above 0 and finite"),
        (json.dumps({"forward": 10**400, "backward": 1}), "each must be above 0 and finite"),
        ('{"forward": 1, "backward": 2, "latency": -1}', "latency is -1"),
    ],
)
def test_anything_else_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Costs.from_json(text)


def test_costs_of_another_shape_are_refused() -> None:
    by_stage = Costs(forward=(1.0, 2.0))
    by_stage.check_shape(num_stages=2, num_chunks=3)
    with pytest.raises(ValueError, match="forward has costs of 2 stages, not of 4"):
        by_stage.check_shape(num_stages=4, num_chunks=1)
    by_chunk = Costs(backward=((1.0, 2.0), 3.0))
    by_chunk.check_shape(num_stages=2, num_chunks=2)
    with pytest.raises(ValueError, match="2 chunks for stage 0, not of 1"):
        by_chunk.check_shape(num_stages=2, num_chunks=1)
