"""``bamboo run`` whose coordinator dies, is stopped, or is away, with real processes."""

import contextlib
import json
import os
import re
import signal
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest
from in_ci import in_ci
from launching import Launch, is_over, processes_of

from megatron_bamboo.agent.job_folder import LOCK_FILE
from megatron_bamboo.agent.lead import LeadStatus
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.journal import JOURNAL_FILE
from megatron_bamboo.membership.secret_file import SECRET_FILE

pytestmark = pytest.mark.multiprocess

LEASE = ("--lease", "2")
# Each key is one that a coordinator writes, in the order of a loss's decision.
KEYS = ["agent/node2", "plan/0", "lost/node1", "ending/0", "plan/1", "reported", "finished/node2"]
KEYS += ["said/finished", "outcome"]


def leader(launch: Launch) -> int:
    """The process that leads."""
    path = launch.job_dir / ADDRESS_FILE
    launch.until(path.exists)
    return int(json.loads(path.read_text())["pid"])


def next_leader(launch: Launch, last: int) -> int:
    return int(launch.until(lambda: (pid := leader(launch)) != last and pid))


def coordinator_log(launch: Launch) -> str:
    return (launch.job_dir / "logs" / "coordinator.log").read_text()


def check_story(launch: Launch, num_iterations: int, lost: Sequence[str]) -> None:
    """Everything was said and done once, whoever led."""
    assert launch.iterations() == list(range(1, num_iterations + 1))
    losses = [json.loads(line) for line in (launch.job_dir / "losses.jsonl").open()]
    assert [loss["step"] for loss in losses] == launch.iterations()
    assert [event["node"] for event in launch.events("loss")] == list(lost)
    plans = launch.events("plan")
    assert [event["epoch"] for event in plans] == list(range(len(plans)))
    assert len(launch.events("finished_job")) == 1
    assert len(re.findall(r"\] lost node\d", launch.out)) == sum(bool(e["lost"]) for e in plans)
    pids = {(e["source"], e["pid"]) for e in launch.events("action")}
    assert len(pids) == len({source for source, _ in pids}), "a worker was started anew"
    names = {path.name for path in launch.job_dir.iterdir()}
    assert names == {
        "job.json", "losses.jsonl", "events", "logs", "outcome.json", JOURNAL_FILE, SECRET_FILE,
        LOCK_FILE,
    }  # fmt: skip


@pytest.mark.parametrize("key", in_ci(KEYS, "plan/1", "outcome"))
def test_a_death_before_and_one_after_a_write_change_nothing(launch: Launch, key: str) -> None:
    options = ("--inject", f"coordinator@before:{key}", "--inject", f"coordinator@after:{key}")
    options += ("--inject", "node1@iter2:1.0F0")
    launch.start(3, *LEASE, options=options).wait(0)
    check_story(launch, 4, ["node1"])
    kills = [(e["fault"], e["generation"]) for e in launch.events("coordinator_kill")]
    assert kills == [(f"coordinator@{m}:{key}", n) for n, m in ((1, "before"), (2, "after"))]
    assert "coordinator 3 goes on" in launch.out


def test_a_death_at_a_write_waits_for_whoever_comes_to_it(launch: Launch) -> None:
    options = ("--inject", "coordinator@after:plan/1", "--inject", "node1@iter6:1.0F0")
    launch.start(3, "--iters", "9", "--pause", "0.1", *LEASE, options=options).wait_for_step(1)
    os.kill(first := leader(launch), signal.SIGKILL)
    next_leader(launch, first)
    launch.wait(0)
    check_story(launch, 9, ["node1"])
    kills = [(e["fault"], e["generation"]) for e in launch.events("coordinator_kill")]
    assert kills == [("coordinator@after:plan/1", 2)]


@pytest.mark.parametrize("after_step", [1, 4])
def test_a_killed_coordinator_is_followed_by_another(launch: Launch, after_step: int) -> None:
    launch.start(3, "--iters", "12", "--pause", "0.01").wait_for_step(after_step)
    os.kill(first := leader(launch), signal.SIGKILL)
    next_leader(launch, first)
    launch.wait(0)
    check_story(launch, 12, [])
    assert len(launch.events("agent_back")) == 3


def test_a_loss_while_nobody_leads_is_handled_afterwards(launch: Launch) -> None:
    launch.start(3, "--iters", "12", "--pause", "0.01", *LEASE).wait_for_step(2)
    launch.process.send_signal(signal.SIGSTOP)
    os.kill(leader(launch), signal.SIGKILL)
    os.killpg(launch.agents()["node1"], signal.SIGKILL)
    time.sleep(1.0)
    launch.process.send_signal(signal.SIGCONT)
    launch.wait(0)
    check_story(launch, 12, ["node1"])
    assert "lost node1 (nothing was heard of it for 2." in launch.out


def test_a_worker_that_ends_while_nobody_leads_is_reported_afterwards(launch: Launch) -> None:
    launch.start(3, "--iters", "12", "--pause", "0.01").wait_for_step(2)
    launch.process.send_signal(signal.SIGSTOP)
    os.kill(leader(launch), signal.SIGKILL)
    os.kill(launch.workers()["node1"], signal.SIGKILL)
    launch.until(lambda: launch.events("worker_exited"))
    launch.process.send_signal(signal.SIGCONT)
    launch.wait(0)
    check_story(launch, 12, ["node1"])
    assert "lost node1 (its worker was ended by signal 9); epoch 1" in launch.out


def test_nodes_whose_coordinator_stays_away_end_at_the_store_s_deadline(launch: Launch) -> None:
    options = ("--store-deadline", "3.5")
    launch.start(3, "--iters", "1000", "--pause", "0.01", *LEASE, options=options).wait_for_step(2)
    launch.process.send_signal(signal.SIGSTOP)
    os.kill(leader(launch), signal.SIGKILL)
    groups, until = launch.groups(), time.monotonic() + 30
    while not all(map(is_over, processes_of(groups))):
        assert time.monotonic() < until, "nodes wait for ever"
        time.sleep(0.05)
    launch.process.send_signal(signal.SIGCONT)
    launch.wait(3)
    assert "has no live holder" in launch.err
    assert any("no coordinator was heard of for" in launch.log(f"node{n}") for n in range(3))


def test_one_who_was_stopped_while_another_began_changes_nothing(launch: Launch) -> None:
    launch.start(3, "--iters", "1000", "--pause", "0.01", *LEASE).wait_for_step(2)
    first = psutil.Process(leader(launch))
    first.suspend()
    second = next_leader(launch, first.pid)
    step = launch.iterations()[-1]
    launch.wait_for_step(step + 3)
    time.sleep(4.0)  # two leases
    first.resume()
    launch.until(lambda: not first.is_running() or first.status() == psutil.STATUS_ZOMBIE)
    assert "Deposed: coordinator 1 is deposed: coordinator 2 leads" in coordinator_log(launch)
    launch.wait_for_step(launch.iterations()[-1] + 3)
    assert leader(launch) == second
    assert launch.events("loss") == []
    assert launch.events("ending") == []
    steps = launch.iterations()
    assert steps == list(range(1, len(steps) + 1))


def test_one_who_was_stopped_with_the_journal_locked_is_ended(
    launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    launch.start(3, "--iters", "1000", "--pause", "0.01", *LEASE).wait_for_step(2)
    first = psutil.Process(leader(launch))
    # The test holds the lock in the place of one who was stopped with it.
    journal = sqlite3.connect(launch.job_dir / JOURNAL_FILE, isolation_level=None)
    # An open file is known to SQLite in the whole process, also in one that is forked later.
    with contextlib.closing(journal) as db:
        first.suspend()
        db.execute("BEGIN IMMEDIATE")
        launch.until(lambda: not first.is_running())
        db.execute("ROLLBACK")
    next_leader(launch, first.pid)
    launch.wait_for_step(launch.iterations()[-1] + 3)
    assert launch.events("loss") == []


def test_a_stopped_launcher_stops_nobody_else(launch: Launch) -> None:
    launch.start(3, "--iters", "20", "--pause", "0.01", "--lease", "1").wait_for_step(2)
    launch.process.send_signal(signal.SIGSTOP)
    launch_is_over = launch.job_dir / "outcome.json"
    until = time.monotonic() + 30
    while not launch_is_over.exists():
        assert time.monotonic() < until
        time.sleep(0.05)
    launch.process.send_signal(signal.SIGCONT)
    launch.wait(0)
    check_story(launch, 20, [])
    assert "goes on" not in launch.out


def test_a_coordinator_that_dies_again_and_again_ends_the_job(launch: Launch) -> None:
    faults = [part for _ in range(5) for part in ("--inject", "coordinator@before:plan/0")]
    launch.start(3, options=tuple(faults)).wait(1)
    assert launch.err == (
        "bamboo run: the coordinator died 5 times within 60 s, at last by signal 9; "
        f"see {launch.job_dir}/logs/coordinator.log\n"
    )
    # There was no coordinator to leave it.
    outcome = json.loads((launch.job_dir / "outcome.json").read_text())
    assert outcome["status"] == 1
    assert f"bamboo run: {outcome['message']}\n" == launch.err


def test_a_death_that_no_coordinator_died_is_reported(launch: Launch) -> None:
    launch.start(3, options=("--inject", "coordinator@before:plan/1")).wait(4)
    assert "never came to --inject coordinator@before:plan/1" in launch.err


@pytest.mark.parametrize("text", ["coordinator@plan/1", "coordinator@during:plan/1"])
def test_a_death_that_is_none_is_refused(launch: Launch, text: str) -> None:
    launch.start(3, options=("--inject", text)).wait(2)
    assert "write coordinator@before:KEY or coordinator@after:KEY" in launch.err


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGKILL])
def test_without_a_launcher_nothing_is_left(launch: Launch, kind: signal.Signals) -> None:
    launch.start(3, "--iters", "1000", "--pause", "0.01", *LEASE).wait_for_step(2)
    stopped = psutil.Process(leader(launch))
    stopped.suspend()
    processes = [stopped, psutil.Process(next_leader(launch, stopped.pid))]
    groups = launch.groups()
    launch.process.send_signal(kind)
    launch.process.wait(30)
    _, alive = psutil.wait_procs(processes, timeout=10)
    assert alive == []
    until = time.monotonic() + 10
    while not all(map(is_over, processes_of(groups))):
        assert time.monotonic() < until
        time.sleep(0.02)


def test_statuses_do_not_meet_those_of_python() -> None:
    assert not {*map(int, LeadStatus)} & {1, 2}


def test_the_outcome_is_left_for_whoever_asks(launch: Launch) -> None:
    launch.start(3, "--redundancy", "none", options=("--inject", "node1@iter2:1.0F0")).wait(3)
    outcome = json.loads((Path(launch.job_dir) / "outcome.json").read_text())
    assert outcome["status"] == 3
    assert outcome["message"] in launch.err
