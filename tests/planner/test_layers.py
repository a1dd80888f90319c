"""Costs by unit are read as they are written, and counted exactly."""

import json

import pytest

from megatron_bamboo.planner.layers import Unit, UnitBytes, UnitCosts

COSTS = UnitCosts(
    (Unit("embedding", 0.1, 0.2, UnitBytes(50, 5)), Unit("layer0", 0.3, 1e-05, UnitBytes(70, 7))),
    message_bytes=9,
)


def test_json_comes_back_the_same() -> None:
    assert UnitCosts.from_json(json.dumps(COSTS.to_json())) == COSTS
    without = UnitCosts((Unit("embedding", 0.1, 0.2),))
    assert UnitCosts.from_json(json.dumps(without.to_json())) == without
    assert not without.has_bytes


def test_names_may_be_left_out_and_other_members_are_left_alone() -> None:
    text = '{"forward": 1, "backward": 2, "units": [{"forward": 1, "backward": 2}]}'
    assert UnitCosts.from_json(text) == UnitCosts((Unit("unit 0", 1.0, 2.0),))


def test_works_are_exact() -> None:
    """In floating point .1 + .2 is not .3."""
    works = COSTS.works()
    assert works.ticks == (30000, 30001)
    assert works.seconds(works.ticks[0]) == 0.3


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "costs are not JSON"),
        ("[]", "there are no costs by unit"),
        ('{"forward": 1, "backward": 2}', "there are no costs by unit"),
        ('{"units": []}', "there are no units"),
        ('{"units": [1]}', "unit 0 is 1"),
        ('{"units": [{"forward": 1}]}', "unit 0: backward is null"),
        ('{"units": [{"forward": 1, "backward": 0}]}', "unit 0: its backward takes 0"),
        ('{"units": [{"forward": NaN, "backward": 1}]}', "its forward takes nan"),
        ('{"units": [{"forward": 1, "backward": 1, "state": 1}]}', "unit 0 has state, which"),
        (
            '{"units": [{"forward": 1, "backward": 1, "state_bytes": 1}]}',
            "unit 0: activation_bytes is null: it must be a whole number",
        ),
        (
            '{"units": [{"forward": 1, "backward": 1, "state_bytes": 1, "activation_bytes": -1}]}',
            "bytes are 0 or above",
        ),
        (
            '{"units": [{"forward": 1, "backward": 1, "state_bytes": 1, "activation_bytes": 1},'
            ' {"forward": 1, "backward": 1}]}',
            "give them for all or none",
        ),
        (
            '{"message_bytes": -1, "units": [{"forward": 1, "backward": 1}]}',
            "a message has -1 bytes",
        ),
    ],
)
def test_what_is_wrong_is_said(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        UnitCosts.from_json(text)
