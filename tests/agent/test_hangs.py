"""When a worker hangs, by what it shows and by the processor time that it uses."""

import os
import subprocess
import sys
import time

import pytest

from megatron_bamboo.agent.hangs import HangJudge
from megatron_bamboo.agent.watch import busy_seconds
from megatron_bamboo.membership.place import DONE, Place
from megatron_bamboo.membership.signs import Signs
from megatron_bamboo.membership.waits import Wait, Waiting

LOOK = 0.25
LIMIT = 8.0


class Worker:
    """What a worker shows while a judge with a lease of 5 s looks."""

    def __init__(self, action: str = "1.0F2", waits_for: str = "") -> None:
        self.judge = HangJudge(5.0)
        self.place = Place(3, action, waits_for)
        self.now = self.busy = 0.0
        self.beat = self.number = 1

    def show(self, seconds: float, beats: bool = True, busy: float = 0.0) -> str | None:
        """Go on like this for some time; the first verdict that there is."""
        for _ in range(round(seconds / LOOK)):
            self.now += LOOK
            self.beat += beats
            self.busy += busy * LOOK
            signs = Signs(self.beat, self.number, self.place, LIMIT)
            if (verdict := self.judge.look(signs, self.busy, self.now)) is not None:
                return verdict
        return None


def test_who_shows_nothing_is_not_judged() -> None:
    judge = HangJudge(5.0)
    assert [judge.look(None, 0.0, now) for now in (0.0, 100.0)] == [None, None]
    assert judge.place == ""


def test_who_moves_does_not_hang() -> None:
    worker = Worker()
    for _ in range(10):
        assert worker.show(LIMIT - 1) is None
        worker.number += 1


def test_a_main_thread_that_stays_too_long_is_stuck() -> None:
    assert Worker().show(20.0) == "its worker was stuck for 8.2 s in 1.0F2 of step 3"


def test_who_waits_for_another_is_not_stuck() -> None:
    worker = Worker(waits_for="node0")
    assert worker.show(100.0) is None
    assert worker.judge.place == "1.0F2 of step 3, waiting for node0"


def test_a_wait_is_as_long_as_the_place_has_been_the_same() -> None:
    judge, waiting = HangJudge(5.0), Waiting(("node0",))
    assert judge.wait("node1") is None
    for number, now in ((1, 0.0), (2, 1.0), (2, 2.5)):
        judge.look(Signs(1, number, Place(3, "1.0RECV_F2", "node0"), LIMIT, waiting), 0.0, now)
    assert judge.wait("node1") == Wait("node1", 2, 3, "1.0RECV_F2", waiting, 1.5, LIMIT)
    judge.look(Signs(1, 3, Place(3, "1.0F2"), LIMIT), 0.0, 3.0)
    assert judge.wait("node1") is None


@pytest.mark.parametrize("waits_for", ["", "node0"])
def test_a_process_that_cannot_run_hangs_wherever_it_is(waits_for: str) -> None:
    worker = Worker(waits_for=waits_for)
    assert worker.show(2.0) is None
    verdict = worker.show(20.0, beats=False)
    assert verdict is not None
    assert verdict.startswith("its worker did not run for 5.2 s, in 1.0F2 of step 3")
    assert worker.now == 7.25


def test_a_process_that_is_busy_runs_though_no_other_thread_gets_a_turn() -> None:
    worker = Worker()
    assert worker.show(2.0) is None
    assert worker.show(20.0, beats=False, busy=0.9) == (
        "its worker was stuck for 8.2 s in 1.0F2 of step 3"
    )


def test_a_process_that_is_done_may_take_its_time_to_end() -> None:
    assert Worker(action=DONE).show(100.0, beats=False) is None


def test_the_processor_time_of_a_process_grows_only_while_it_runs() -> None:
    code = "while True: pass"
    with subprocess.Popen([sys.executable, "-c", code]) as process:
        until = time.monotonic() + 10
        while busy_seconds(process.pid) < 0.05:
            assert time.monotonic() < until
        process.kill()
    assert busy_seconds(process.pid) == 0.0
    assert busy_seconds(os.getpid()) > 0.0
