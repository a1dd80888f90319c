"""Reports of passed steps reach the store once, without anyone waiting for it."""

import time

from local_peers import Beside
from server_thread import ServerThread, store_client

from megatron_bamboo.execution.reports import StepReporter
from megatron_bamboo.membership.decision import StepReport
from megatron_bamboo.membership.store_client import StoreClient


def report(step: int, seconds: float = 1.0) -> StepReport:
    loss = float(step).hex()
    return StepReport(step, 0, loss, 1e-3, None, 16 * step, seconds, (loss,))


def stored(client: StoreClient, step: int) -> StepReport | None:
    value = client.get(f"passed/{step}")
    return None if value is None else StepReport.from_json(value)


def test_the_first_node_reports_at_once(client: StoreClient) -> None:
    reporter = StepReporter(client)
    reporter.passed(report(1), is_first=True)
    client.wait(["passed/1"])
    assert stored(client, 1) == report(1)
    reporter.finish()


def test_others_report_only_when_they_may_be_the_first(client: StoreClient) -> None:
    reporter = StepReporter(client)
    for step in (1, 2):
        reporter.passed(report(step), is_first=False)
    reporter.passed(report(3), is_first=True)
    client.wait(["passed/3"])
    assert client.count("passed/") == 1
    reporter.repeat()
    reporter.finish()
    assert [stored(client, step) for step in (1, 2, 3)] == [report(1), report(2), report(3)]


def test_the_first_report_of_a_step_stays(client: StoreClient) -> None:
    first, second = StepReporter(client), StepReporter(client)
    first.passed(report(1), is_first=True)
    first.finish()
    second.passed(report(1, seconds=9.0), is_first=True)
    second.finish()
    assert stored(client, 1) == report(1)


def test_when_it_is_finished_the_store_has_the_last_steps(client: StoreClient) -> None:
    reporter = StepReporter(client)
    for step in range(1, 101):
        reporter.passed(report(step), is_first=False)
    reporter.finish()
    steps = [step for step in range(1, 101) if stored(client, step) is not None]
    assert steps == list(range(37, 101))


def test_training_does_not_wait_for_the_store_nor_a_report_get_lost(server: ServerThread) -> None:
    client = store_client(server.address, 0.2)
    reporter = StepReporter(client)
    stall = Beside(server.call, time.sleep, 0.8)  # longer than the client's deadline
    time.sleep(0.1)
    begin = time.monotonic()
    for step in (1, 2, 3):
        reporter.passed(report(step), is_first=True)
    assert time.monotonic() - begin < 0.2
    stall.join()
    reporter.finish()
    patient = store_client(server.address, 5)
    assert [stored(patient, step) for step in (1, 2, 3)] == [report(1), report(2), report(3)]
    patient.close()
    client.close()
