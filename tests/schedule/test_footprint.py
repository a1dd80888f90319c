"""What a worker needs, from sizes that tell where each byte comes from."""

import pytest

from megatron_bamboo.schedule.footprint import (
    Category,
    ChunkSizes,
    Footprint,
    StageSizes,
    footprint,
    held_by_device,
)
from megatron_bamboo.schedule.generate import compute_schedule
from megatron_bamboo.schedule.lower import lower
from megatron_bamboo.schedule.redundancy import Redundancy, add_redundancy
from megatron_bamboo.schedule.tail import add_tail

MICROBATCHES = 4
FIRST = StageSizes(10, 20, 40, stepped=1_000, tied=0, chunks=(ChunkSizes(100, 5_000_000),))
LAST = StageSizes(30, 60, 90, stepped=2_000, tied=0, chunks=(ChunkSizes(300, 7_000_000),))
MESSAGE = 100_000


def needs(
    rank: int,
    mode: Redundancy,
    num_mirrors: int = 0,
    tied: int = 0,
    keeps_redundant: bool = True,
    on_host: bool = False,
) -> Footprint:
    compute = compute_schedule(2, 1, MICROBATCHES)
    schedule = add_tail(lower(add_redundancy(compute, mode, num_mirrors=num_mirrors)), tied > 0)
    stages = [
        StageSizes(s.parameters, s.gradients, s.optimizer, s.stepped, tied, s.chunks)
        for s in (FIRST, LAST)
    ]
    return footprint(schedule, rank, stages, MESSAGE, keeps_redundant, on_host)


def test_without_replicas_the_first_stage_needs_most_when_most_passes_are_under_way() -> None:
    first, last = needs(0, Redundancy.NONE), needs(1, Redundancy.NONE)
    assert first.largest[Category.ACTIVATIONS] == 2 * 100
    assert last.largest[Category.ACTIVATIONS] == 300
    # All outputs, all gradients that came, and the outputs sent in the step before.
    assert first.largest[Category.MESSAGES] == 3 * MICROBATCHES * MESSAGE
    assert [first.at_peak[c] for c in Category][:4] == [10, 20, 40, 0]
    assert last.at_peak[Category.REPLICA] == last.largest[Category.REDUNDANT] == 0


def test_a_replica_takes_what_its_stage_does_and_gradients_that_go_to_and_fro() -> None:
    first = needs(0, Redundancy.LAZY)
    assert first.at_peak[Category.REPLICA] == 30 + 60 + 90
    assert str(first.where) == "1RECV_REFRESH"
    # The own gradient, sent in this step and the one before, and that of the replica.
    refreshes = 2 * 1_000 + 2_000
    assert first.at_peak[Category.MESSAGES] == 3 * MICROBATCHES * MESSAGE + refreshes
    assert first.at_peak[Category.ACTIVATIONS] == 0


def test_redundant_forwards_keep_all_until_the_step() -> None:
    first, last = needs(0, Redundancy.EAGER), needs(1, Redundancy.EAGER)
    assert first.at_peak[Category.REDUNDANT] == MICROBATCHES * 300
    assert last.at_peak[Category.REDUNDANT] == MICROBATCHES * 100
    # Theirs are outputs too, but for those of the model's end.
    more = last.largest[Category.MESSAGES] - needs(1, Redundancy.LAZY).largest[Category.MESSAGES]
    assert more == MICROBATCHES * MESSAGE
    dropped = needs(0, Redundancy.EAGER, keeps_redundant=False)
    assert dropped.largest[Category.REDUNDANT] == 0
    assert dropped.largest[Category.MESSAGES] == first.largest[Category.MESSAGES]


@pytest.mark.parametrize(("num_mirrors", "kept"), [(1, 1), (2, 2), (3, 2)])
def test_of_mirrors_the_newest_two_are_kept(num_mirrors: int, kept: int) -> None:
    without, mirrored = (needs(0, Redundancy.LAZY, k) for k in (0, num_mirrors))
    more = mirrored.largest[Category.MESSAGES] - without.largest[Category.MESSAGES]
    assert more == kept * 7_000_000


def test_each_role_of_a_tied_weight_is_kept_sent_and_received() -> None:
    """And was sent in the step before."""
    alone, tied = needs(0, Redundancy.NONE), needs(0, Redundancy.NONE, tied=11)
    assert tied.largest[Category.MESSAGES] - alone.largest[Category.MESSAGES] == 4 * 11


def test_what_is_on_the_host_makes_no_peak_of_the_device() -> None:
    device, host = (needs(0, Redundancy.EAGER, on_host=on_host) for on_host in (False, True))
    assert host.largest == device.largest
    sizes = {Category.PARAMETERS: 3, Category.REDUNDANT: 4}
    assert (held_by_device(sizes, False), held_by_device(sizes, True)) == (7, 3)
    # Without messages: the first time that two passes are under way is as good as any later one.
    large = StageSizes(1, 1, 1, stepped=0, tied=0, chunks=(ChunkSizes(10**9, 0),))
    schedule = add_tail(lower(add_redundancy(compute_schedule(2, 1, 4), Redundancy.EAGER)), False)
    late, early = (
        footprint(schedule, 0, [large, large], 0, on_host=on_host) for on_host in (False, True)
    )
    assert late.at_peak[Category.REDUNDANT] == 4 * 10**9 > early.at_peak[Category.REDUNDANT]
    assert early.at_peak[Category.ACTIVATIONS] == 2 * 10**9
