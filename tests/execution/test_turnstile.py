"""All workers of a node pass an action, or none of them does."""

import os
import time
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection

import pytest

from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.execution.turnstile import Turnstile
from megatron_bamboo.membership.store_client import StoreClient

SOON = 0.1
SECONDS = 10.0


def never() -> bool:
    return False


@pytest.fixture
def page() -> int:
    """The memory that a node's workers share, for up to three of them."""
    descriptor = os.memfd_create("turnstile-of-a-test")
    os.truncate(descriptor, 8 * 4)
    return descriptor


class Worker:
    """A forked worker of the node, that runs one function with its turnstile."""

    def __init__(self, page: int, rank: int, size: int, run: Callable[[Turnstile], object]) -> None:
        context = get_context("fork")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=self._run, args=(page, rank, size, run, theirs))
        self._process.start()

    def result(self) -> object:
        """What the function returned, or the name of what it raised."""
        assert self._ours.poll(SECONDS), "it did not end"
        self._process.join(SECONDS)
        return self._ours.recv()

    def is_under_way(self) -> bool:
        return not self._ours.poll(0)

    @staticmethod
    def _run(
        page: int, rank: int, size: int, run: Callable[[Turnstile], object], answer: Connection
    ) -> None:
        turnstile = Turnstile(page, rank, size, SECONDS)
        try:
            answer.send(run(turnstile))
        except (EpochEnded, DeadlineExceeded) as error:
            answer.send(type(error).__name__)


@pytest.mark.multiprocess
def test_all_pass_one_action_after_another(page: int) -> None:
    def run(turnstile: Turnstile) -> float:
        for number in range(50):
            turnstile.pass_together(f"action {number}", never)
        return time.monotonic()

    workers = [Worker(page, rank, 3, run) for rank in range(3)]
    assert all(isinstance(worker.result(), float) for worker in workers)


@pytest.mark.multiprocess
def test_nobody_passes_before_the_last_has_arrived(page: int) -> None:
    first = Worker(page, 0, 2, lambda turnstile: turnstile.pass_together("2.0F3", never))
    time.sleep(SOON)
    assert first.is_under_way()
    Turnstile(page, 1, 2, SECONDS).pass_together("2.0F3", never)
    assert first.result() is None


@pytest.mark.multiprocess
def test_different_actions_do_not_meet(page: int) -> None:
    first = Worker(page, 0, 2, lambda turnstile: turnstile.pass_together("in epoch 0", never))
    with pytest.raises(DeadlineExceeded, match="in epoch 1"):
        Turnstile(page, 1, 2, SOON).pass_together("in epoch 1", never)
    assert first.is_under_way()
    Turnstile(page, 1, 2, SECONDS).pass_together("in epoch 0", never)
    assert first.result() is None


@pytest.mark.multiprocess
def test_who_turns_back_in_time_keeps_the_others_from_passing(page: int) -> None:
    with pytest.raises(EpochEnded):
        Turnstile(page, 1, 2, SECONDS).pass_together("2.0F3", lambda: True)

    def run(turnstile: Turnstile) -> None:
        begin = time.monotonic()
        turnstile.pass_together("2.0F3", lambda: time.monotonic() > begin + SOON)

    assert Worker(page, 0, 2, run).result() == "EpochEnded"


def test_who_has_turned_back_can_come_again(page: int) -> None:
    first, second = (Turnstile(page, rank, 2, SOON) for rank in range(2))
    with pytest.raises(EpochEnded):
        first.pass_together("in epoch 0", lambda: True)
    with pytest.raises(DeadlineExceeded):
        first.pass_together("in epoch 1", never)
    second.pass_together("in epoch 1", never)


def test_nobody_turns_back_once_all_have_arrived(page: int) -> None:
    first, second = (Turnstile(page, rank, 2, SOON) for rank in range(2))

    def arrived_meanwhile() -> bool:
        second.pass_together("2.0F3", never)
        return True

    first.pass_together("2.0F3", arrived_meanwhile)


def test_a_worker_that_does_not_come_is_told_after_the_deadline(page: int) -> None:
    begin = time.monotonic()
    with pytest.raises(DeadlineExceeded, match=r"did not come to 2\.0F3"):
        Turnstile(page, 0, 2, SOON).pass_together("2.0F3", never)
    assert SOON <= time.monotonic() - begin < SECONDS


def test_the_workers_of_a_node_find_its_meeting_place(client: StoreClient) -> None:
    first = Turnstile.meet(client, "node0", 0, 2, SOON)
    second = Turnstile.meet(client, "node0", 1, 2, SOON)
    elsewhere = Turnstile.meet(client, "node1", 0, 2, SOON)
    with pytest.raises(DeadlineExceeded):
        first.pass_together("2.0F3", never)
    with pytest.raises(DeadlineExceeded):
        elsewhere.pass_together("2.0F3", never)
    second.pass_together("2.0F3", never)
