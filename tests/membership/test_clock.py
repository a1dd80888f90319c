"""A clock that does not count what nobody listened to."""

from megatron_bamboo.membership.clock import LONGEST_GAP_SECONDS, PatientClock, boot_time


def test_short_gaps_count_whole_and_long_ones_little() -> None:
    now = 100.0
    clock = PatientClock(lambda: now)
    for gap, counted in ((0.25, 0.25), (LONGEST_GAP_SECONDS, 0.5), (60.0, 0.5), (0.125, 0.125)):
        before = clock.seconds
        now += gap
        assert clock.look() - before == counted


def test_it_runs_by_itself() -> None:
    clock, began = PatientClock(), boot_time()
    while boot_time() - began < 0.02:
        clock.look()
    assert 0.0 < clock.seconds <= boot_time() - began + 0.02
