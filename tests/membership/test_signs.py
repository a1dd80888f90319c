"""Signs of life between two processes."""

import os
import signal
import subprocess
import sys
import time
from dataclasses import replace

from megatron_bamboo.membership.place import START, Place
from megatron_bamboo.membership.signs import SignPage, Signs
from megatron_bamboo.membership.waits import Sent, Waiting

WORKER = """
import sys, time
from megatron_bamboo.membership.place import Place
from megatron_bamboo.membership.signs import SignPage
page = SignPage.open(sys.argv[1])
page.start_beats()
page.show(Place(3, "1.0RECV_F2", "node0"), 7.5)
time.sleep(60)
"""


def test_nothing_is_shown_at_first() -> None:
    assert SignPage.make("node1").read() is None


def test_the_last_place_is_shown() -> None:
    page = SignPage.make("node1")
    other = SignPage.open(page.path)
    for number, place in enumerate((Place(0, START), Place(12, "0COMMIT", "x" * 500)), start=1):
        other.show(place, 0.5)
        assert page.read() == Signs(0, number, place, 0.5)
    other.beat()
    assert page.read() == Signs(1, 2, place, 0.5)


def test_a_wait_for_thousands_is_shown() -> None:
    page = SignPage.make("node1")
    sent = (Sent("node0", 12, "0.0RECV_B0", 16),)
    waiting = Waiting(tuple(f"node{number}" for number in range(5000)), sent)
    page.show(Place(12, "0COMMIT", "the others"), 0.5, waiting)
    assert page.read() == Signs(0, 1, Place(12, "0COMMIT", "the others"), 0.5, waiting)


def test_what_is_half_written_is_not_read() -> None:
    page = SignPage.make("node1")
    page.show(Place(3, "1.0F2"), 1.0)
    page._page[20] ^= 1
    assert page.read() is None


def test_a_process_beats_until_it_is_stopped_or_ended() -> None:
    page = SignPage.make("node1")
    with subprocess.Popen([sys.executable, "-c", WORKER, page.path]) as worker:
        signs = read(page)
        assert replace(signs, beat=0) == Signs(0, 1, Place(3, "1.0RECV_F2", "node0"), 7.5)
        while read(page).beat < signs.beat + 2:
            time.sleep(0.01)
        os.kill(worker.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, worker.pid, os.WSTOPPED)
        signs = read(page)
        time.sleep(0.5)
        assert read(page) == signs
        worker.kill()
    assert read(page) == signs


def read(page: SignPage) -> Signs:
    until = time.monotonic() + 30
    while (signs := page.read()) is None or signs.beat == 0:
        assert time.monotonic() < until
        time.sleep(0.01)
    return signs
