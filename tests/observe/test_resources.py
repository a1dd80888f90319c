"""What is opened and started is counted, and what is closed and ended no more."""

import socket
import threading
import time

from megatron_bamboo.observe.resources import Resources


def test_sockets_and_files_are_counted() -> None:
    before = Resources.now()
    with open("/dev/null"), socket.socket():
        within = Resources.now()
    assert within == Resources(before.threads, before.descriptors + 2, before.sockets + 1)
    assert Resources.now() == before


def test_threads_are_counted() -> None:
    before, over = Resources.now(), threading.Event()
    thread = threading.Thread(target=over.wait)
    thread.start()
    assert Resources.now().threads == before.threads + 1
    over.set()
    thread.join()
    # The kernel counts it a moment longer than Python does.
    until = time.monotonic() + 10.0
    while Resources.now() != before and time.monotonic() < until:
        time.sleep(0.001)
    assert Resources.now() == before
