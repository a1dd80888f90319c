"""What a worker says and learns when an epoch ends, over a real store."""

import json
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import replace
from typing import Any

import pytest
from server_thread import ServerThread, store_client

from megatron_bamboo.execution import epochs
from megatron_bamboo.execution.commit import to_hex
from megatron_bamboo.execution.epochs import (
    FAILED_STATUS,
    FENCED_STATUS,
    STORE_LOST_STATUS,
    EpochWatch,
    Handlers,
    StepProgress,
    common_progress,
)
from megatron_bamboo.execution.errors import DeadlineExceeded, EpochEnded
from megatron_bamboo.execution.ledger import CommitLedger
from megatron_bamboo.membership.decision import Record, StepDecision
from megatron_bamboo.membership.store_client import StoreClient, StoreError
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import Plan, initial_plan
from megatron_bamboo.planner.taking_over import plan_after_loss
from megatron_bamboo.schedule.actions import Action
from megatron_bamboo.schedule.takeover import Progress

ME, VICTIM = "node1", "node2"
NODES = tuple(f"node{number}" for number in range(4))
START = initial_plan(NODES, equal_pipelines(4, len(NODES) // 4, 4), "lazy")
NEXT = plan_after_loss(START, {VICTIM}, StepDecision(7, False, None, "nobody entered its commit"))


def actions(texts: str) -> frozenset[Action]:
    return frozenset(Action.parse(text) for text in texts.split())


def made(step: int, done: str = "", received: str = "") -> StepProgress:
    return StepProgress(step, Progress(actions(done), actions(received)))


MADE = made(7, "1.0F0 1.0SEND_F0", "1.0RECV_F0 1.0RECV_F1")


class Worker:
    """The control thread of one worker, and what it asked the rest of the worker for."""

    def __init__(self, client: StoreClient, tensor_rank: int = 0, tensor_size: int = 1) -> None:
        self.client = client
        self.left: list[tuple[int, tuple[str, ...]]] = []
        self.woken = threading.Event()
        self.name = ME if tensor_size == 1 else f"{ME}:{tensor_rank}"
        self.ledger = CommitLedger(self.name)
        self.keys_at_progress: list[int] = []
        self.prepared: list[int] = []
        self.may_prepare = threading.Event()
        self.may_prepare.set()

        def read_plan(text: bytes) -> Plan:
            return Plan.from_json(text).for_tensor_rank(tensor_rank, tensor_size)

        handlers = Handlers(
            self._leave, self._progress, read_plan, self.woken.set, self._prepare, self._failed
        )
        plan = START.for_tensor_rank(tensor_rank, tensor_size)
        self.watch = EpochWatch(client, self.name, tensor_size, plan, self.ledger, handlers)
        self.watch.start()

    def _leave(self, epoch: int, lost: Collection[str]) -> None:
        self.left.append((epoch, tuple(lost)))

    def _failed(self, error: Exception) -> None:
        self.client.set("failed", type(error).__name__.encode())

    def _progress(self) -> StepProgress:
        self.keys_at_progress.append(self.client.count("record/"))
        return MADE

    def _prepare(self, plan: Plan) -> None:
        assert self.may_prepare.wait(10)
        self.prepared.append(plan.epoch)

    def follow(self, seconds: float = 10) -> Plan:
        self.watch.wait_for_plan(seconds, "waiting")
        return self.watch.take_pending()


MakeWorker = Callable[[int, int], Worker]


@pytest.fixture
def make_worker(client: StoreClient) -> Iterator[MakeWorker]:
    """Makes workers that stop following before their store goes: else they end the process."""
    workers = []

    def make(tensor_rank: int, tensor_size: int) -> Worker:
        workers.append(Worker(client, tensor_rank, tensor_size))
        return workers[-1]

    yield make
    for worker in workers:
        worker.watch.close()


@pytest.fixture
def worker(make_worker: MakeWorker) -> Worker:
    return make_worker(0, 1)


def announce(client: StoreClient, epoch: int, *lost: str) -> None:
    client.set(f"ending/{epoch}", json.dumps({"lost": lost}).encode())


def publish(client: StoreClient, plan: Plan) -> None:
    client.set(f"plan/{plan.epoch}", plan.to_json().encode())


def value_of(client: StoreClient, key: str) -> bytes:
    client.wait([key])
    value = client.get(key)
    assert value is not None
    return value


def record_of(client: StoreClient, epoch: int) -> Record:
    return Record.from_json(value_of(client, f"record/{epoch}/{ME}"))


def test_progress_comes_back_exactly() -> None:
    assert StepProgress.from_json(MADE.to_json().encode()) == MADE
    assert StepProgress.from_json(made(0).to_json().encode()) == made(0)


def test_common_is_what_all_have_done() -> None:
    behind = made(7, "1.0F0 1.0F1", "1.0RECV_F1 1.0RECV_F2")
    assert common_progress([MADE, behind]) == made(7, "1.0F0", "1.0RECV_F1")
    assert common_progress([MADE]) == MADE


def test_nothing_of_a_step_is_common_that_some_have_not_begun() -> None:
    for order in ([MADE, made(6, "1.0F0")], [made(6, "1.0F0"), MADE]):
        assert common_progress(order) == made(7)


def test_nothing_of_a_step_is_common_that_some_have_not_begun_anew() -> None:
    anew = replace(made(7, "1.0F0"), attempt=2)
    assert common_progress([MADE, anew]) == replace(made(7), attempt=2)
    assert common_progress([anew, anew]) == anew
    assert StepProgress.from_json(anew.to_json().encode()) == anew


def test_a_loss_is_answered_with_progress_and_then_one_record(
    worker: Worker, client: StoreClient
) -> None:
    announce(client, 0, VICTIM)
    assert record_of(client, 0) == Record(ME, 0, False, False, None)
    assert StepProgress.from_json(value_of(client, f"progress/0/{ME}")) == MADE
    assert worker.keys_at_progress == [0], "the record was there before the progress"
    assert worker.left == [(0, (VICTIM,))]
    assert not worker.watch.has_pending()
    with pytest.raises(EpochEnded):
        worker.ledger.commit(7, lambda: (1.0,), lambda: None)


def test_the_plan_is_there_for_the_main_thread_with_its_decision(
    worker: Worker, client: StoreClient
) -> None:
    worker.ledger.commit(7, lambda: (1.0,), lambda: None)
    decision = StepDecision(8, True, to_hex((2.0,)), "node0 passed its commit")
    announce(client, 0, VICTIM)
    publish(client, replace(NEXT, decision=decision))
    plan = worker.follow()
    assert plan == replace(NEXT, decision=decision)
    assert not worker.watch.has_pending()
    assert worker.woken.wait(10)
    assert worker.ledger.passed_vector(7) == (1.0,)


def test_who_was_lost_while_records_were_gathered_is_left_too(
    worker: Worker, client: StoreClient
) -> None:
    plan = plan_after_loss(START, {"node0", VICTIM}, NEXT.decision)
    announce(client, 0, VICTIM)
    publish(client, plan)
    worker.follow()
    assert worker.left == [(0, (VICTIM,)), (0, ("node0", VICTIM))]


def test_epochs_are_followed_while_the_main_thread_is_busy(
    worker: Worker, client: StoreClient
) -> None:
    later = plan_after_loss(NEXT, {"node0"}, NEXT.decision)
    announce(client, 0, VICTIM)
    publish(client, NEXT)
    announce(client, 1, "node0")
    publish(client, later)
    value_of(client, f"record/1/{ME}")
    assert worker.follow() == NEXT
    assert worker.follow() == later
    assert [epoch for epoch, _lost in worker.left] == [0, 0, 1, 1]


def test_a_vector_that_was_handed_over_is_in_the_record_of_the_next_epoch(
    worker: Worker, client: StoreClient
) -> None:
    def broken() -> tuple[float, ...]:
        raise ValueError

    with pytest.raises(ValueError):
        worker.ledger.commit(7, broken, lambda: None)
    announce(client, 0, VICTIM)
    vector = to_hex((2.0,))
    publish(client, replace(NEXT, decision=StepDecision(7, True, vector, "node0 passed")))
    announce(client, 1, "node0")
    assert record_of(client, 0) == Record(ME, 7, True, False, None)
    assert record_of(client, 1) == Record(ME, 7, True, True, vector)


def test_all_workers_of_a_lost_node_are_left(make_worker: MakeWorker, client: StoreClient) -> None:
    worker = make_worker(1, 2)
    announce(client, 0, VICTIM)
    publish(client, NEXT)
    plan = worker.follow()
    assert plan.lost == (f"{VICTIM}:1",)
    both = (f"{VICTIM}:0", f"{VICTIM}:1")
    assert worker.left == [(0, both), (0, both)]
    assert client.get(f"record/0/{ME}:1") is not None


def test_without_a_plan_the_deadline_says_what_was_waited_for(worker: Worker) -> None:
    with pytest.raises(DeadlineExceeded, match="1TIE of step 7, but no node"):
        worker.watch.wait_for_plan(0.1, "1TIE of step 7")


def test_the_progress_of_a_node_is_what_its_workers_have_in_common(
    make_worker: MakeWorker, client: StoreClient
) -> None:
    worker = make_worker(0, 2)
    client.set("progress/0/node3:0", MADE.to_json().encode())
    client.set("progress/0/node3:1", made(7, "1.0F0").to_json().encode())
    assert worker.watch.progress_of(0, "node3:0", 5) == made(7, "1.0F0")


def test_progress_is_waited_for(worker: Worker, client: StoreClient) -> None:
    with pytest.raises(DeadlineExceeded, match="progress/0/node3"):
        worker.watch.progress_of(0, "node3", 0.2)
    late = threading.Timer(0.2, client.set, ["progress/0/node3", MADE.to_json().encode()])
    late.start()
    assert worker.watch.progress_of(0, "node3", 10) == MADE
    late.join()


def test_who_is_lost_before_it_could_publish_has_no_progress(
    worker: Worker, client: StoreClient
) -> None:
    announce(client, 0, VICTIM)
    publish(client, NEXT)
    worker.follow()
    announce(client, 1, "node3")
    publish(client, plan_after_loss(NEXT, {"node0"}, NEXT.decision))
    worker.watch.wait_for_plan(10, "waiting")
    assert worker.watch.progress_of(0, "node0", 10) is None


def test_who_is_done_with_the_training_has_no_progress(worker: Worker, client: StoreClient) -> None:
    client.set("done/node2", b"1")
    assert worker.watch.progress_of(0, "node2", seconds=30) is None


def exit_status(server: ServerThread, act: Callable[[Worker], Any], deadline: float = 5) -> int:
    """Of a forked worker that acts and then waits to be ended by its control thread."""
    child = os.fork()
    if child == 0:
        try:
            act(Worker(store_client(server.address, deadline)))
            time.sleep(20)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.multiprocess
def test_a_fenced_worker_ends_at_once(server: ServerThread, client: StoreClient) -> None:
    client.set(f"record/0/{ME}", b"fenced")
    status = exit_status(server, lambda worker: announce(worker.client, 0, VICTIM))
    assert status == FENCED_STATUS
    assert client.get(f"record/0/{ME}") == b"fenced"


@pytest.mark.multiprocess
def test_a_worker_whose_store_is_silent_for_a_while_goes_on_following(
    server: ServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(epochs, "_POLL_SECONDS", 0.1)
    monkeypatch.setattr("megatron_bamboo.membership.store_client.ANSWER_GRACE_SECONDS", 0.3)

    def go_on(worker: Worker) -> None:
        time.sleep(1.2)
        announce(worker.client, 0, VICTIM)
        publish(worker.client, NEXT)
        worker.follow()
        os._exit(0)

    silence = threading.Timer(0.3, server.call, [time.sleep, 0.7])
    silence.start()
    assert exit_status(server, go_on) == 0
    silence.join()


@pytest.mark.multiprocess
def test_a_worker_that_the_plan_calls_lost_ends_at_once(
    server: ServerThread, client: StoreClient
) -> None:
    publish(client, plan_after_loss(START, {ME}, NEXT.decision))
    status = exit_status(server, lambda worker: announce(worker.client, 0, VICTIM))
    assert status == FENCED_STATUS


@pytest.mark.multiprocess
def test_a_worker_without_a_plan_after_a_loss_ends(server: ServerThread) -> None:
    status = exit_status(server, lambda worker: announce(worker.client, 0, VICTIM), deadline=0.5)
    assert status == STORE_LOST_STATUS


@pytest.mark.multiprocess
def test_a_worker_whose_control_thread_fails_says_so_and_ends(
    server: ServerThread, client: StoreClient
) -> None:
    client.set("plan/1", b"no plan")
    status = exit_status(server, lambda worker: announce(worker.client, 0, VICTIM))
    assert status == FAILED_STATUS
    assert client.get("failed") == b"JSONDecodeError"


@pytest.mark.multiprocess
def test_a_worker_that_was_told_to_stop_following_is_not_ended(
    server: ServerThread,
) -> None:
    def finish(worker: Worker) -> None:
        worker.watch.close()
        worker.client.close()
        with pytest.raises(StoreError):
            worker.client.get("epoch")
        time.sleep(0.2)
        os._exit(0)

    assert exit_status(server, finish) == 0


def test_the_main_thread_turns_to_a_plan_at_once_and_gets_it_when_it_is_prepared(
    worker: Worker, client: StoreClient
) -> None:
    worker.may_prepare.clear()
    announce(client, 0, VICTIM)
    publish(client, NEXT)
    worker.watch.wait_for_plan(10, "waiting")
    assert worker.watch.has_pending() and worker.prepared == []
    threading.Timer(0.05, worker.may_prepare.set).start()
    assert worker.watch.take_pending().epoch == 1
    assert worker.prepared == [1]
