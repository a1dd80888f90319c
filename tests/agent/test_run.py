"""``bamboo run`` with real processes: what it says, how it ends, and that nothing is left."""

import contextlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from launching import SCRIPT, Launch, is_over, processes_of

from megatron_bamboo.membership.secret_file import SECRET_FILE
from megatron_bamboo.observe.events import read_events

pytestmark = pytest.mark.multiprocess

ITERATION = re.compile(
    r" \[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] iteration        3/       4 \| "
    r"consumed samples:           48 \| elapsed time per iteration \(ms\): 250\.0 \| "
    r"learning rate: 1\.000000E-03 \| global batch size:    16 \| lm loss: 3\.333333E\+00 \| "
    r"grad norm: 1\.500 \|"
)


def test_an_undisturbed_job_says_each_iteration_once(launch: Launch) -> None:
    launch.start(3).wait(0)
    assert launch.iterations() == [1, 2, 3, 4]
    assert any(ITERATION.fullmatch(line) for line in launch.out.splitlines())
    losses = [json.loads(line) for line in (launch.job_dir / "losses.jsonl").open()]
    assert losses == [
        {"step": step, "loss": (10 / step).hex(), "grad_norm": (1.5).hex()} for step in range(1, 5)
    ]
    assert launch.err == ""
    assert launch.events("loss") == []
    last = launch.out.splitlines()[-1]
    assert last == f"finished: iteration 4 of 4; see {launch.job_dir}"
    assert (launch.job_dir / SECRET_FILE).stat().st_mode & 0o777 == 0o600
    assert launch.log("coordinator") == ""


def test_an_injected_loss_is_taken_over_in_the_same_job(launch: Launch) -> None:
    options = ("--inject", "node1@iter2:1.0B0")
    launch.start(6, "--pipelines", "2", options=options).wait(0)
    assert launch.iterations() == [1, 2, 3, 4]
    (fault,) = launch.events("fault")
    assert (fault["source"], fault["step"], fault["action"]) == ("node1", 2, "1.0B0")
    assert (
        "lost node1 (its connection closed); epoch 1: node0 takes over stage 1 of pipeline 0 from "
        "node1; step "
    ) in launch.out
    after = [e for e in launch.events("action") if e["epoch"] == 1]
    assert {e["source"] for e in after if e["action"].startswith("1.0")} == {"node0", "node4"}
    by_node = {(e["source"], e["pid"]) for e in launch.events("action")}
    assert len(by_node) == 6, "a survivor was started anew"
    assert "\nfinished: iteration 4 of 4, nodes lost on the way: 1; see " in launch.out


def test_a_node_killed_from_outside_is_taken_over(launch: Launch) -> None:
    launch.start(3, "--iters", "12", "--pause", "0.01").wait_for_step(2)
    os.killpg(launch.agents()["node2"], signal.SIGKILL)
    launch.wait(0)
    assert launch.iterations() == list(range(1, 13))
    assert "node1 takes over stage 2" in launch.out


@pytest.mark.parametrize("whom", ["agents", "workers"])
def test_killing_one_process_of_a_node_loses_the_node(launch: Launch, whom: str) -> None:
    launch.start(3, "--iters", "12", "--pause", "0.01").wait_for_step(2)
    victims = {"agents": launch.agents(), "workers": launch.workers()}
    os.kill(victims[whom]["node0"], signal.SIGKILL)
    launch.wait(0)
    sign = {"agents": "its connection closed", "workers": "its worker was ended by signal 9"}
    assert f"lost node0 ({sign[whom]}); epoch 1: node2 takes over stage 0" in launch.out


@pytest.mark.parametrize("whom", ["agents", "workers"])
def test_what_a_worker_has_started_ends_with_the_node(launch: Launch, whom: str) -> None:
    script = ("--iters", "1000", "--pause", "0.01", "--misbehave", "node1:start-children")
    launch.start(3, *script).wait_for_step(2)
    group = launch.agents()["node1"]
    assert len(processes_of({group})) == 5
    victims = {"agents": launch.agents(), "workers": launch.workers()}
    os.kill(victims[whom]["node1"], signal.SIGKILL)
    launch.until(lambda: not alive(group))
    (loss,) = launch.until(lambda: launch.events("loss"))
    assert loss["node"] == "node1"


def alive(group: int) -> list[psutil.Process]:
    return [process for process in processes_of({group}) if not is_over(process)]


@pytest.mark.parametrize("launcher_too", [False, True])
def test_a_stopped_node_whose_agent_is_killed_leaves_nothing(
    launch: Launch, launcher_too: bool
) -> None:
    script = ("--iters", "1000", "--pause", "0.01", "--misbehave", "node1:start-children")
    launch.start(3, *script).wait_for_step(2)
    groups = launch.agents()
    os.killpg(groups["node1"], signal.SIGSTOP)
    if launcher_too:
        launch.process.kill()
    else:
        os.kill(groups["node1"], signal.SIGKILL)
    until = time.monotonic() + 10
    while alive(groups["node1"]) or (launcher_too and any(map(alive, groups.values()))):
        assert time.monotonic() < until, "processes outlive their agent"
        time.sleep(0.02)


def test_a_stopped_node_is_lost_and_ends_when_it_wakes(launch: Launch) -> None:
    script = ("--iters", "1000", "--pause", "0.01", "--lease", "2")
    launch.start(3, *script).wait_for_step(2)
    group = launch.agents()["node1"]
    began = time.monotonic()
    os.killpg(group, signal.SIGSTOP)
    (loss,) = launch.until(lambda: launch.events("loss"))
    assert 1.4 <= loss["time"] - began < 10
    assert loss["cause"].startswith("nothing was heard of it for 2.")
    launch.wait_for_step(launch.iterations()[-1] + 1)
    assert len(alive(group)) == 3
    os.killpg(group, signal.SIGCONT)
    launch.until(lambda: not alive(group))
    assert "this node was declared lost: nothing was heard of it" in launch.log("node1")
    written = [e["epoch"] for e in launch.events("action") if e["source"] == "node1"]
    assert set(written) == {0}


def test_a_coordinator_that_was_stopped_itself_blames_nobody(launch: Launch) -> None:
    launch.start(3, "--iters", "12", "--pause", "0.01", "--lease", "1").wait_for_step(2)
    launch.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    launch.process.send_signal(signal.SIGCONT)
    launch.wait(0)
    assert launch.events("loss") == []


def test_an_agent_that_is_stopped_alone_takes_its_node_along(launch: Launch) -> None:
    script = ("--iters", "1000", "--pause", "0.01", "--lease", "2")
    launch.start(3, *script).wait_for_step(2)
    os.kill(launch.agents()["node1"], signal.SIGSTOP)
    (loss,) = launch.until(lambda: launch.events("loss"))
    assert loss["node"] == "node1"
    worker = psutil.Process(launch.workers()["node1"])
    launch.until(lambda: worker.status() == psutil.STATUS_ZOMBIE)
    assert "its node was declared lost" in launch.log("node1")


def test_a_worker_that_ends_without_a_word_is_a_lost_node_with_a_log(launch: Launch) -> None:
    launch.start(3, "--misbehave", "node1:raise@2").wait(0)
    assert "lost node1 (its worker ended with status 1); epoch 1" in launch.out
    log = (launch.job_dir / "logs" / "node1.log").read_text()
    assert "RuntimeError: node1 has a bug in step 2" in log


def test_a_worker_that_raises_is_a_lost_node_and_says_what(launch: Launch) -> None:
    launch.start(3, "--misbehave", "node1:tell@2").wait(0)
    assert (
        "lost node1 (its worker raised RuntimeError: a bug (in 1.0F0 of step 2)); epoch 1"
    ) in launch.out
    log = (launch.job_dir / "logs" / "node1.log").read_text()
    assert "RuntimeError: a bug" in log.splitlines()


def test_a_worker_that_leaves_too_early_is_a_lost_node(launch: Launch) -> None:
    launch.start(3, "--misbehave", "node1:leave@2").wait(0)
    assert (
        "lost node1 (its worker ended with status 0 before the training was over); epoch 1"
    ) in launch.out


@pytest.mark.parametrize("nodes", [(0, 1, 2), (0, 2)])
def test_an_error_of_the_script_ends_the_job_in_one_line(
    launch: Launch, nodes: tuple[int, ...]
) -> None:
    """All workers have it, or only those that ever run stage 0: its node and then its shadow."""
    ways = [part for node in nodes for part in ("--misbehave", f"node{node}:tell@2")]
    launch.start(3, *ways).wait(1)
    (line,) = launch.err.splitlines()
    assert line.startswith("bamboo run: node")
    assert "raised RuntimeError: a bug (in " in line
    assert f"; its traceback is in {launch.job_dir}/logs/node" in line
    assert line.endswith(" raised it too")


def test_an_error_that_leaves_a_stage_without_holder_is_named(launch: Launch) -> None:
    launch.start(3, "--redundancy", "none", "--misbehave", "node1:tell@2").wait(3)
    log = launch.job_dir / "logs" / "node1.log"
    assert launch.err.splitlines()[-1] == (
        "bamboo run: pipeline 0: stage 1 has no live holder (node1 was its only one); node1 raised "
        f"RuntimeError: a bug (in 1.0F0 of step 2); its traceback is in {log}; it has no checkpoint"
    )


def test_two_losses_at_once_are_both_taken_over(launch: Launch) -> None:
    launch.start(6, "--pipelines", "2", "--iters", "12", "--pause", "0.01").wait_for_step(2)
    agents = launch.agents()
    for node in ("node1", "node5"):
        os.killpg(agents[node], signal.SIGKILL)
    launch.wait(0)
    assert launch.iterations() == list(range(1, 13))
    losses = [plan["lost"] for plan in launch.events("plan") if plan["lost"]]
    assert len(losses) in (1, 2)
    assert {node for lost in losses for node in lost} == {"node1", "node5"}


@pytest.mark.parametrize(
    ("way", "epochs"), [("die-after-record", [1, 2]), ("die-before-record", [1])]
)
def test_a_loss_while_a_loss_is_decided(launch: Launch, way: str, epochs: list[int]) -> None:
    options = ("--inject", "node1@iter2:1.0F1")
    script = ("--pipelines", "2", "--misbehave", f"node5:{way}")
    launch.start(6, *script, options=options).wait(0)
    assert launch.iterations() == [1, 2, 3, 4]
    assert [plan["epoch"] for plan in launch.events("plan") if plan["lost"]] == epochs
    assert "node0 takes over stage 1 of pipeline 0" in launch.out
    assert "node4 takes over stage 2 of pipeline 1" in launch.out


def test_losses_without_progress_end_the_job(launch: Launch) -> None:
    options = ("--inject", "node1@iter2:1.0F1", "--max-failures", "1")
    script = ("--pipelines", "2", "--misbehave", "node5:die-after-record")
    launch.start(6, *script, options=options).wait(5)
    line = launch.err.splitlines()[-1]
    assert (
        "nodes were lost 2 times, more than --max-failures, since step 1 passed, at last node5 ("
        in line
    )
    assert line.endswith("it has no checkpoint")


def test_a_worker_that_leaves_no_record_is_fenced(launch: Launch) -> None:
    options = ("--inject", "node1@iter2:1.0F1", "--record-deadline", "0.5")
    script = ("--pipelines", "2", "--misbehave", "node5:silent")
    launch.start(6, *script, options=options).wait(0)
    assert "node5 (it left no record within 0.5 s); epoch 1" in launch.out
    assert launch.iterations() == [1, 2, 3, 4]
    ending, decided = launch.events("ending")[0], launch.events("plan")[1]
    assert 0.5 <= decided["time"] - ending["time"] < 2


def test_shadow_and_victim_together_end_the_job(launch: Launch) -> None:
    options = ("--inject", "node1@iter2:1.0F1")
    launch.start(3, "--misbehave", "node0:die-before-record", options=options).wait(3)
    assert launch.err.splitlines()[-1] == (
        "bamboo run: pipeline 0: stage 1 has no live holder (node1 and node0 are both lost); "
        "it has no checkpoint"
    )


def test_without_redundancy_a_loss_ends_the_job(launch: Launch) -> None:
    options = ("--inject", "node1@iter2:1.0F1")
    launch.start(3, "--redundancy", "none", options=options).wait(3)
    assert "stage 1 has no live holder (node1 was its only one)" in launch.err
    assert launch.iterations() == [1]


def test_a_node_that_finished_has_nothing_to_lose(launch: Launch) -> None:
    launch.start(3, "--misbehave", "node1:linger", "--misbehave", "node2:linger")
    done = launch.until(lambda: len(launch.events("finished")) == 1)
    assert done
    for node in ("node1", "node2"):
        os.killpg(launch.agents()[node], signal.SIGKILL)
    launch.wait(0)
    assert launch.events("loss") == []


def test_a_loss_after_the_last_step_of_the_others_needs_no_takeover(launch: Launch) -> None:
    launch.start(3, "--redundancy", "lazy", "--misbehave", "node1:die-at-end").wait(0)
    assert "lost node1 (its connection closed) after the last step" in launch.out
    assert [plan["epoch"] for plan in launch.events("plan")] == [0]


def test_the_only_holder_of_a_stage_must_not_die_before_it_has_saved(launch: Launch) -> None:
    launch.start(3, "--redundancy", "none", "--misbehave", "node1:die-at-end").wait(3)
    assert "stage 1 has no live holder (node1 was its only one)" in launch.err


def test_a_terminal_gets_a_progress_bar(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", "3"]
    command += ["--job-dir", str(tmp_path / "job"), str(SCRIPT)]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        # A terminal whose last writer has gone answers with an error.
        with contextlib.suppress(OSError):
            while chunk := os.read(ours, 4096):
                shown += chunk
        assert process.wait(30) == 0
    os.close(ours)
    assert b"4/4" in shown
    assert shown.count(b"] iteration ") == 4
    assert (tmp_path / "job" / "logs" / "node0.log").read_text() == ""


def test_an_injection_never_reached_is_an_error(launch: Launch) -> None:
    launch.start(3, options=("--inject", "node1@iter2:2.0B0")).wait(4)
    assert launch.iterations() == [1, 2, 3, 4]
    assert "never came to --inject node1@iter2:2.0B0" in launch.err


def test_a_job_that_stands_still_is_ended(launch: Launch) -> None:
    script = ("--misbehave", "node1:hang@2", "--lease", "1", "--group-timeout", "4.5")
    launch.start(3, *script, options=("--stall-limit", "5", "--record-deadline", "1")).wait(1)
    assert "no iteration passed within 5 s" in launch.err


def test_who_stops_reading_does_not_stop_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", "3"]
    command += ["--job-dir", str(tmp_path / "job"), str(SCRIPT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(30) == 0
    assert len((tmp_path / "job" / "losses.jsonl").read_text().splitlines()) == 4


def test_what_cannot_be_shown_does_not_stop_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", "3"]
    command += ["--job-dir", str(tmp_path / "job"), str(SCRIPT)]
    with open("/dev/full", "w") as full:
        assert subprocess.run(command, stdout=full, stderr=full, timeout=120).returncode == 0
    assert len((tmp_path / "job" / "losses.jsonl").read_text().splitlines()) == 4


def test_a_terminal_that_is_closed_does_not_stop_the_job(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", "3"]
    command += ["--job-dir", str(tmp_path / "job"), str(SCRIPT), "--pause", "0.05"]
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        shown = b""
        while b"] iteration " not in shown:
            shown += os.read(ours, 4096)
        os.close(ours)
        assert process.wait(120) == 0
    assert len((tmp_path / "job" / "losses.jsonl").read_text().splitlines()) == 4


@pytest.mark.parametrize("kind", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_no_process_behind(launch: Launch, kind: signal.Signals) -> None:
    launch.start(3, "--iters", "1000", "--pause", "0.01").wait_for_step(1)
    assert len(processes_of(launch.groups())) == 9  # by node its agent, guard and worker
    launch.process.send_signal(kind)
    launch.wait(130)
    assert launch.err == "bamboo run: interrupted; nothing is left running\n"


def test_a_node_that_would_read_another_file_is_not_started_again(
    launch: Launch, tmp_path: Path
) -> None:
    data = tmp_path / "data.bin"
    data.write_text("one")
    script = ("--iters", "100000", "--pause", "0.01", "--data", str(data))
    launch.start(3, *script, options=("--respawn", "0.1")).wait_for_step(1)
    data.write_text("two")
    os.killpg(launch.agents()["node1"], signal.SIGKILL)
    launch.until(lambda: f"node1 is not started again: --data {data}: here 3 bytes" in launch.out)
    launch.process.send_signal(signal.SIGINT)
    launch.wait(130)
    assert set(launch.agents()) == {"node0", "node1", "node2"}


def test_an_interrupt_while_preparing_ends_the_script(launch: Launch) -> None:
    launch.start(3, "--prepare", "sleep")
    note = launch.job_dir / "preparing"
    preparing = int(launch.until(lambda: note.exists() and note.read_text()))
    launch.process.send_signal(signal.SIGTERM)
    launch.wait(130)
    assert not psutil.pid_exists(preparing)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_launcher_leaves_no_process_behind(launch: Launch, stopped: bool) -> None:
    launch.start(3, "--iters", "1000", "--pause", "0.01").wait_for_step(1)
    groups = launch.groups()
    if stopped:
        os.killpg(launch.agents()["node1"], signal.SIGSTOP)
    launch.process.kill()
    until = time.monotonic() + 5
    while not all(map(is_over, processes_of(groups))):
        assert time.monotonic() < until, "processes outlive their launcher"
        time.sleep(0.02)


REFUSED = [
    (("--inject", "node9@iter2:1.0F1"), (), "there is no node9; the nodes are node0 to node2"),
    (("--inject", "node1.2@iter2:1.0F1"), (), "there is no node1.2; the nodes are node0 to node2"),
    (
        ("--respawn", "1", "--inject", "node3.2@iter2:1.0F1"),
        (),
        "there is no node3.2; the nodes are node0 to node2",
    ),
    (("--respawn", "0"), (), "--respawn 0: give more than 0 seconds"),
    (("--respawn", "1"), ("--redundancy", "none"), "without replicas the first loss ends the job"),
    (("--inject", "node1@iter2:1.0f1"), (), "is no action: write"),
    (("--inject", "node1@iter2: 1.0F1"), (), "is no action: write"),
    (("--inject", "node1@2:1.0F1"), (), "write NODE@iterN:ACTION, like node5@iter7:2.0B3"),
    (("--inject", "node1@iter0:1.0F1"), (), "write NODE@iterN:ACTION"),
    (("--inject", "node1@iter5:1.0F1"), (), "there is no iteration 5; this job has 1 to 4"),
    (("--inject", "node1@iter4:3.0F1"), (), "there is no stage 3; this job has 0 to 2"),
    (("--inject", "node1@iter4:1.0F2"), (), "there is no microbatch 2; this job has 0 to 1"),
    (("--inject", "node1@iter4:1.1F1"), (), "there is no chunk 1"),
    (("--inject", "node1@iter4:3STEP"), (), "there is no stage 3"),
    (
        ("--inject", "node1@iter1:1.0F1", "--inject", "node1@iter2:1.0F1"),
        (),
        "node1 can have only one fault",
    ),
    (
        ("--inject", "node1@iter2:#3:cut", "--store", "etcd://127.0.0.1:1"),
        (),
        "node1@iter2:#3:cut: each node then has a network of its own, from which --store etcd://",
    ),
    (("--workers-per-node", "2"), (), "--workers-per-node 2: the script's layers are shared by 1"),
    (("--record-deadline", "0"), (), "--record-deadline must be more than 0 seconds"),
    (("--store-deadline", "inf"), (), "at most 604800 (a week), not inf"),
    (("--startup-deadline", "nan"), (), "--startup-deadline must be more than 0 seconds"),
    (("--stall-limit", "604801"), (), "--stall-limit must be more than 0 seconds and at most"),
    (("--job-dir", f"{__file__}/job"), (), "cannot be made or written to (Not a directory)"),
    (("--job-dir", "/proc/job"), (), "cannot be made or written to (No such file or directory)"),
    (("--job-dir", "x" * 300), (), "cannot be made or written to (File name too long)"),
    (("--job-dir", "/sys"), (), "--job-dir /sys cannot be made or written to"),
    ((), ("--stages", "2"), "1 pipelines of 2 stages need 2 nodes, not --nodes 3"),
    (("--stall-limit", "60"), (), "--distributed-timeout-minutes (600 s) must be less than"),
    ((), ("--prepare", "silent"), "the script left no usable"),
    ((), ("--prepare", "refuse"), "fake_training: --stages does not suit me"),
]


@pytest.mark.parametrize(("options", "script", "message"), REFUSED)
def test_bad_input_is_one_line_before_any_worker_starts(
    launch: Launch, options: tuple[str, ...], script: tuple[str, ...], message: str
) -> None:
    launch.start(3, *script, options=options).wait(2)
    (line,) = launch.err.splitlines()
    assert message in line
    assert launch.out == ""
    assert not (launch.job_dir / "logs").exists()


def test_a_script_that_fails_to_prepare_is_no_bad_input(launch: Launch) -> None:
    launch.start(3, "--prepare", "raise").wait(1)
    assert "RuntimeError: cannot prepare" in launch.err
    assert "failed while preparing (1)" in launch.err.splitlines()[-1]


def test_a_folder_that_holds_a_run_is_refused(launch: Launch) -> None:
    (launch.job_dir / "events").mkdir(parents=True)
    launch.start(3).wait(2)
    assert "already holds a run: give another --job-dir" in launch.err


def test_options_that_were_refused_do_not_use_up_the_folder(launch: Launch) -> None:
    launch.start(3, "--stages", "2").wait(2)
    launch.start(3).wait(0)


def test_a_secret_that_others_can_read_starts_nothing(launch: Launch, tmp_path: Path) -> None:
    secret = tmp_path / "shown"
    secret.write_text("a secret that is as long as it must be\n")
    secret.chmod(0o644)
    options = ("--secret-file", str(secret))
    launch.start(3, options=options).wait(2)
    assert launch.err == (
        f"bamboo run: {secret} holds the job's secret and is open to others (mode 0644): give it "
        "mode 600, and a new secret if others may have read it\n"
    )
    secret.chmod(0o600)
    launch.start(3, options=options).wait(0)
    assert not (launch.job_dir / SECRET_FILE).exists()


def test_a_script_that_is_not_there_is_named(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", "2", "absent.py"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30)
    assert (ended.returncode, ended.stderr) == (2, "bamboo run: there is no script absent.py\n")
    assert list(tmp_path.iterdir()) == []


def test_launcher_and_agent_import_no_torch() -> None:
    code = "import megatron_bamboo.agent.run, sys; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=30).returncode == 0


def test_events_carry_one_clock_for_all_sources(launch: Launch) -> None:
    launch.start(3, options=("--inject", "node1@iter2:1.0F1")).wait(0)
    order = [e["event"] for e in read_events(launch.job_dir / "events")]
    assert order.index("fault") < order.index("loss") < order.index("ending")
    assert order.index("ending") < order.index("decision") < order.index("finished_job")
