"""Evaluations of several workers: the same losses, whoever is lost at whatever moment."""

from pathlib import Path
from typing import Any

import pytest
from evaluating_peers import evaluate, expected_losses

from megatron_bamboo.observe.events import read_events
from megatron_bamboo.planner.arrangement import Arrangement, equal_pipelines

THREE_STAGES = equal_pipelines(3, 2, 2)
TWO_CHUNKS = equal_pipelines(2, 1, 4, num_chunks=2)
UNEQUAL = Arrangement(
    (equal_pipelines(3, 1, 3).pipelines[0], equal_pipelines(3, 1, 1).pipelines[0])
)

pytestmark = pytest.mark.timeout(400)


@pytest.mark.parametrize("arrangement", [THREE_STAGES, TWO_CHUNKS, UNEQUAL])
def test_undisturbed_all_find_the_losses_of_one_loop(
    server: Any, tmp_path: Path, arrangement: Arrangement
) -> None:
    outcomes = evaluate(server.address, tmp_path, arrangement)
    assert len(outcomes) == arrangement.num_nodes
    assert len({outcome.to_json() for outcome in outcomes.values()}) == 1
    assert outcomes["node0"].losses == expected_losses(arrangement)
    assert outcomes["node0"].epoch == 0


@pytest.mark.parametrize(
    ("arrangement", "fatal"),
    [
        (THREE_STAGES, "node0@EVAL1/0.0F0"),
        (THREE_STAGES, "node0@EVAL2/0.0SEND_F1"),
        (THREE_STAGES, "node1@EVAL1/1.0F1"),
        (THREE_STAGES, "node4@EVAL2/1.0RECV_F0"),
        # Who sums up, and who reports in another pipeline.
        (THREE_STAGES, "node2@EVAL3/2.0F1"),
        (THREE_STAGES, "node5@EVAL2/2.0RECV_F1"),
        (TWO_CHUNKS, "node1@EVAL2/1.1F2"),
        (TWO_CHUNKS, "node0@EVAL3/0.1RECV_F3"),
        (UNEQUAL, "node5@EVAL3/2.0F0"),
    ],
)
def test_a_loss_changes_no_bit_of_the_losses(
    server: Any, tmp_path: Path, arrangement: Arrangement, fatal: str
) -> None:
    outcomes = evaluate(server.address, tmp_path, arrangement, fatal)
    assert len(outcomes) == arrangement.num_nodes - 1
    assert {tuple(o.losses.items()) for o in outcomes.values()} == {
        tuple(expected_losses(arrangement).items())
    }
    # What the victim's pipeline had reported is not done again.
    victim, batch = fatal.partition("@")[0], int(fatal.partition("EVAL")[2].partition("/")[0])
    number = int(victim.removeprefix("node")) // arrangement.pipelines[0].num_stages
    again = [e for e in read_events(tmp_path) if e["event"] == "evaluation_begun" and e["epoch"]]
    assert {e["first_batch"] for e in again if e["pipeline"] == number} == {batch - 1}


def test_nobody_waits_for_one_who_knew_the_outcome_before_it_knew_of_the_loss(
    server: Any, tmp_path: Path
) -> None:
    """Who sums up has all that it needs from those who run the rest under the new plan."""
    fatal = "node5@EVAL3/2.0F0"
    outcomes = evaluate(server.address, tmp_path, THREE_STAGES, fatal, unaware="node2")
    expected = expected_losses(THREE_STAGES)
    assert [outcome.losses for outcome in outcomes.values()] == [expected] * 5
