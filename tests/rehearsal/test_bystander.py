"""What a bystander sees of a job's folder, and does to its processes."""

import errno
import os
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from needs import missing

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.process import ForkedProcess, fork
from megatron_bamboo.membership.address import ADDRESS_FILE, Address
from megatron_bamboo.membership.journal import JOURNAL_FILE, Journal
from megatron_bamboo.membership.table import Table
from megatron_bamboo.observe.events import EventLog, read_events
from megatron_bamboo.planner.arrangement import equal_pipelines
from megatron_bamboo.planner.plan import plan_digest
from megatron_bamboo.rehearsal.bystander import Bystander
from megatron_bamboo.rehearsal.networks import HUB_ADDRESS, cut_off, hub, join_hub, why_not

SHAPE = JobShape(
    equal_pipelines(2, 1, 2), "lazy", train_iters=9, global_batch_size=2, lease_seconds=1.0
)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Table]:
    SHAPE.write(tmp_path)
    journal = Journal(tmp_path / JOURNAL_FILE)
    journal.claim(1.0)
    yield Table(journal)
    journal.close()


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    process.kill()
    process.wait()


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def until_state(pid: int, state: str, bystander: Bystander) -> None:
    until = time.monotonic() + 20
    while state_of(pid) != state:
        assert time.monotonic() < until
        bystander.look()
        time.sleep(0.02)


def is_reached(host: str) -> bool:
    with socket.socket() as client:
        client.settimeout(5)
        return client.connect_ex((host, 9)) == errno.ECONNREFUSED


def test_before_there_is_a_store_nothing_is_seen(tmp_path: Path) -> None:
    bystander = Bystander(tmp_path, ())
    bystander.look()
    assert bystander.plans == {}


def test_every_plan_that_the_store_holds_is_noted(tmp_path: Path, store: Table) -> None:
    bystander = Bystander(tmp_path, ())
    for values in (
        {"plan/0": b"first"},
        {"plan/1": b"second", "epoch": b"1"},
        {"plan/1": b"other"},
    ):
        store.set_all(values)
        bystander.look()
    assert bystander.plans == {
        0: {plan_digest(b"first")},
        1: {plan_digest(b"second"), plan_digest(b"other")},
    }


def test_a_stopped_node_is_woken(
    tmp_path: Path, store: Table, sleeper: subprocess.Popen[bytes]
) -> None:
    bystander = Bystander(tmp_path, ())
    os.killpg(sleeper.pid, signal.SIGSTOP)
    log = EventLog(tmp_path / "events", "node1")
    log.emit("fault", how="stop", group=sleeper.pid)
    log.close()
    until_state(sleeper.pid, "T", bystander)
    until_state(sleeper.pid, "S", bystander)


def test_a_node_that_was_cut_off_has_its_network_again(tmp_path: Path, store: Table) -> None:
    if (reason := why_not()) is not None:
        missing("netns", reason)
    bystander = Bystander(tmp_path, ())

    def be_cut_off() -> int:
        join_hub(1, os.getppid())
        cut_off()
        log = EventLog(tmp_path / "events", "node1")
        log.emit("fault", how="cut", group=os.getpid())
        log.close()
        while not is_reached(HUB_ADDRESS):
            time.sleep(0.02)
        return 0

    with hub():
        node = ForkedProcess(fork(be_cut_off))
        until = time.monotonic() + 30
        while (status := node.poll()) is None:
            bystander.look()
            if time.monotonic() > until:
                node.kill()
            time.sleep(0.02)
    assert status == 0


def test_the_coordinator_is_stopped_in_its_step_and_woken(
    tmp_path: Path, store: Table, sleeper: subprocess.Popen[bytes]
) -> None:
    Address("127.0.0.1", 1, 1, sleeper.pid).write(tmp_path / ADDRESS_FILE)
    bystander = Bystander(tmp_path, (3,))
    log = EventLog(tmp_path / "events", "node1")
    log.emit("resources", step=2)
    bystander.look()
    assert state_of(sleeper.pid) != "T"
    log.emit("resources", step=3)
    log.close()
    until_state(sleeper.pid, "T", bystander)
    (stop,) = [e for e in read_events(tmp_path / "events") if e["event"] == "coordinator_stop"]
    assert (stop["step"], stop["generation"]) == (3, 1)
    until_state(sleeper.pid, "S", bystander)
