"""``bamboo coordinator`` and ``bamboo agent`` with real processes: who joins, goes and is back."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launching import WAIT_SECONDS, Launch, OpenJob, processes_of

from megatron_bamboo.cli import main as bamboo
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.secret_file import SECRET_FILE

pytestmark = pytest.mark.multiprocess

LEASE = ("--lease", "30", "--pause", "0.01")
"""Nothing here is found by silence, so that a busy machine loses no node."""
LONG = (*LEASE, "--iters", "100000")
UNSAVED = (
    "bamboo stop: its script was started without --save: nothing can be saved; the job ends after "
    "its step\n"
)


def assert_nothing_runs(job: OpenJob) -> None:
    until = time.monotonic() + WAIT_SECONDS
    while left := processes_of(job.groups()):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_nodes_come_in_any_order_and_one_more_takes_a_lost_ones_place(open_job: OpenJob) -> None:
    job = open_job.add("b").start(3, *LONG).add("c", "a", "d10")
    job.until((job.job_dir / ADDRESS_FILE).exists)
    address = json.loads((job.job_dir / ADDRESS_FILE).read_text())
    secret = ("--secret-file", str(job.job_dir / SECRET_FILE))
    job.add("d9", options=secret, join=f"{address['host']}:{address['port']}")
    job.wait_for_step(2)
    job.until(lambda: len(job.agents()) == 5)
    first = job.events("plan")[0]["pipelines"][0]["stages"]
    assert len(first) == 3 and first == sorted(first, key=lambda name: (name[0], len(name), name))
    victim = first[1]
    os.killpg(job.agents()[victim], signal.SIGKILL)
    assert job.end_of(victim) == 1
    assert f"bamboo agent: {victim} was lost; see " in job.said(victim, "err")
    (changed,) = job.until(lambda: job.events("changed"))
    runs = changed["pipelines"][0]["stages"]
    assert victim not in runs and len(set(runs)) == 3 and not set(runs) <= set(first)
    # Its machine is there again, under the same name.
    job.add(victim)
    job.until(lambda: f"{victim}.2" in job.agents())
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(WAIT_SECONDS) == 130
    assert all(job.end_of(node) == 0 for node in job.nodes)
    assert "the job is over, with status 130" in job.said(victim)
    assert_nothing_runs(job)
    assert job.add("late").end_of("late") == 0
    assert "is over, with status 130" in job.said("late")


def test_a_node_that_is_told_to_leave_does_so_and_its_end_is_a_good_one(open_job: OpenJob) -> None:
    job = open_job.start(3, *LEASE, "--iters", "40").add("a", "b", "c", "spare")
    job.wait_for_step(2)
    leaver = job.events("plan")[0]["pipelines"][0]["stages"][0]
    job.nodes[leaver].send_signal(signal.SIGTERM)
    assert job.end_of(leaver) == 0
    assert job.said(leaver).endswith(f"{leaver}: left the job\n")
    assert job.process.wait(WAIT_SECONDS) == 0, job.err
    assert f"drained {leaver} (SIGTERM)" in job.out
    assert job.events("loss") == []
    assert job.iterations() == list(range(1, 41))
    assert all(job.end_of(node) == 0 for node in job.nodes)
    assert_nothing_runs(job)


def test_a_node_that_is_to_leave_before_the_job_begins_makes_place_for_another(
    open_job: OpenJob,
) -> None:
    job = open_job.start(3, *LEASE, "--iters", "4").add("a", "b")
    job.until(lambda: job.workers().keys() == {"a", "b"})
    job.nodes["a"].send_signal(signal.SIGTERM)
    assert job.end_of("a") == 0
    assert job.said("a").endswith("a: left the job\n")
    job.add("c", "d")
    assert job.process.wait(WAIT_SECONDS) == 0, job.err
    assert job.events("plan")[0]["pipelines"][0]["stages"] == ["b", "c", "d"]
    assert job.events("loss") == []
    assert_nothing_runs(job)


def test_a_node_that_is_to_leave_while_it_begins_leaves(open_job: OpenJob) -> None:
    """Told once, in the moment in which its starting process has just made another one."""
    job = open_job.start(3, *LONG).add("a", "b", "c")
    job.wait_for_step(1)
    for node in ("spare1", "spare2"):
        job.add(node)
        while "joins as" not in job.said(node):
            assert job.nodes[node].poll() is None, job.said(node, "err")
            time.sleep(0.001)
        job.nodes[node].send_signal(signal.SIGTERM)
    for node in ("spare1", "spare2"):
        assert job.end_of(node) == 0, job.said(node, "err")
        assert job.said(node).endswith(f"{node}: left the job\n")
    assert job.events("loss") == []


def test_a_machine_that_is_not_taken_after_all_joins_again(
    open_job: OpenJob, tmp_path: Path
) -> None:
    """The notice proves false when it is decided that others take over what the node holds."""
    notices = ("--notices", f"file:{tmp_path}/{{node}}.notice")
    job = open_job.start(3, *LEASE[:2], "--pause", "1", "--iters", "100000", options=notices)
    job.add("a", "b", "c")
    job.wait_for_step(1)
    (tmp_path / "b.notice").touch()
    job.until(lambda: len(job.events("plan")) == 2)
    (tmp_path / "b.notice").unlink()
    job.until(lambda: "b.2" in job.agents())
    (drained,) = job.events("drained")
    assert (drained["node"], drained["stays"]) == ("b", True)
    # It was no standby before it had ended.
    assert all("b" not in plan["pipelines"][0]["stages"] for plan in job.events("plan")[2:])
    assert job.nodes["b"].poll() is None and "joins as b.2" in job.said("b")
    job.nodes["b"].send_signal(signal.SIGTERM)
    assert job.end_of("b") == 0
    assert job.said("b").endswith("b.2: left the job\n")
    assert job.events("loss") == []


def handles(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler for a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = re.findall(r"SigCgt:\s*(\w+)", status)
    return bool(int(caught, 16) >> (number - 1) & 1)


def test_a_node_that_is_to_leave_before_it_has_joined_ends_well(open_job: OpenJob) -> None:
    pid = open_job.add("a").nodes["a"].pid
    until = time.monotonic() + WAIT_SECONDS
    while not handles(pid, signal.SIGTERM):
        assert time.monotonic() < until
        time.sleep(0.05)
    open_job.nodes["a"].send_signal(signal.SIGTERM)
    assert open_job.end_of("a") == 0
    assert "this machine is to be taken before it has joined" in open_job.said("a")


def test_a_node_says_for_whom_it_waits_and_that_it_was_interrupted(open_job: OpenJob) -> None:
    node = open_job.add("a").nodes["a"]
    until = time.monotonic() + WAIT_SECONDS
    while not (said := open_job.said("a")):
        assert time.monotonic() < until and node.poll() is None
        time.sleep(0.05)
    why = f"there is no {open_job.job_dir / ADDRESS_FILE}: was its bamboo coordinator started?"
    assert said == f"bamboo agent: waits for the job's coordinator: {why}\n"
    node.send_signal(signal.SIGINT)
    assert open_job.end_of("a") == 130
    assert open_job.said("a", "err") == "bamboo agent: interrupted before it has joined\n"


def test_interrupting_a_node_leaves_nothing_of_it(open_job: OpenJob) -> None:
    job = open_job.start(3, *LONG).add("a", "b", "c")
    job.wait_for_step(1)
    job.nodes["a"].send_signal(signal.SIGINT)
    assert job.end_of("a") == 130
    assert processes_of({job.agents()["a"]}) == []
    assert job.said("a", "err") == "bamboo agent: interrupted; nothing of a is left\n"


def test_a_coordinator_that_is_interrupted_before_its_nodes_came_says_so(
    open_job: OpenJob, capsys: pytest.CaptureFixture[str]
) -> None:
    job = open_job.start(3, *LONG)
    job.until((job.job_dir / ADDRESS_FILE).exists)
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(WAIT_SECONDS) == 130
    assert job.err == "bamboo coordinator: interrupted; no node had come\n"
    line = refused(capsys, *coordinator(job.job_dir))
    assert "already holds a job, which has ended (status 130, interrupted): give another" in line
    assert "nothing was trained in this one" in line


def test_a_job_that_is_being_prepared_is_said_to_be(
    open_job: OpenJob, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    begun, script = tmp_path / "begun", tmp_path / "slow.py"
    script.write_text(f"import pathlib, time\npathlib.Path({str(begun)!r}).touch()\n")
    with script.open("a") as file:
        file.write("time.sleep(900)\n")
    job = open_job.start(3, script=script)
    job.until(begun.exists)
    line = refused(capsys, "status", str(job.job_dir))
    assert f"the job in {job.job_dir} is being prepared (process {job.process.pid} on " in line
    assert f"prepares the job in {job.job_dir}: {script} checks its options" in job.out
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(WAIT_SECONDS) == 130
    assert job.err == "bamboo coordinator: interrupted while it prepared; nothing has begun\n"
    line = refused(capsys, "status", str(job.job_dir))
    assert f"there is no job in {job.job_dir}: give the folder" in line


def test_a_coordinator_that_is_started_again_goes_on_with_the_job(open_job: OpenJob) -> None:
    script = (*LEASE, "--iters", "60")
    job = open_job.start(3, *script).add("a", "b", "c")
    job.wait_for_step(5)
    job.process.kill()
    job.process.wait()
    first = json.loads((job.job_dir / ADDRESS_FILE).read_text())
    job.start(3, *script)
    assert job.process.wait(WAIT_SECONDS) == 0, job.err
    assert json.loads((job.job_dir / "outcome.json").read_text())["lost"] == []
    assert "coordinator 2 goes on" in job.out and first["generation"] == 1
    losses = [json.loads(line)["step"] for line in (job.job_dir / "losses.jsonl").open()]
    assert losses == list(range(1, 61))
    joined = [e["node"] for e in job.events("agent_joined")]
    assert sorted(joined) == ["a", "b", "c"]


def test_a_half_written_address_ends_nobody_and_is_written_again(open_job: OpenJob) -> None:
    job = open_job.start(3, *LONG).add("a", "b", "c")
    job.wait_for_step(2)
    path = job.job_dir / ADDRESS_FILE
    said = path.read_text()
    path.write_text(said[:20])
    job.until(lambda: path.read_text() == said)
    job.wait_for_step(job.iterations()[-1] + 5)
    assert job.events("loss") == [] and "coordinator 2" not in job.out
    job.process.send_signal(signal.SIGINT)
    assert job.process.wait(WAIT_SECONDS) == 130


def test_a_second_coordinator_and_one_with_other_options_are_refused(open_job: OpenJob) -> None:
    job = open_job.start(3, *LONG)
    job.until((job.job_dir / ADDRESS_FILE).exists)
    first, job._process = job.process, None
    assert job.start(3, *LONG).process.wait(WAIT_SECONDS) == 2
    assert f"has a coordinator already (process {first.pid} on " in job.err
    first.kill()
    first.wait()
    assert job.start(3, *LONG, "--redundancy", "none").process.wait(WAIT_SECONDS) == 2
    assert "was begun with other options, and has not ended" in job.err.splitlines()[-1]


def test_at_the_end_of_its_time_a_job_saves_and_the_next_one_goes_on(
    open_job: OpenJob, tmp_path: Path
) -> None:
    checkpoint = tmp_path / "checkpoint"
    script = ("--checkpoint", str(checkpoint))
    job = open_job.start(3, *LONG, *script).add("a", "b", "c", "spare")
    job.wait_for_step(2)
    job.process.send_signal(signal.SIGUSR1)
    assert job.process.wait(WAIT_SECONDS) == 6, job.err
    last = job.iterations()[-1]
    assert checkpoint.read_text() == str(last)
    assert job.iterations() == list(range(1, last + 1))
    assert job.err == (
        f"bamboo coordinator: stopped after step {last} of 100000 (SIGUSR1, as at the end of its "
        f"time); start it again with --load {checkpoint}, which holds step {last}\n"
    )
    assert all(job.end_of(node) == 0 for node in job.nodes)
    assert_nothing_runs(job)
    job.job_dir = tmp_path / "next"
    job.start(3, *LEASE, "--iters", str(last + 3), *script).add("a", "b", "c")
    assert job.process.wait(WAIT_SECONDS) == 0, job.err
    assert job.iterations() == list(range(1, last + 4))


def test_a_node_that_can_never_leave_is_not_waited_for(open_job: OpenJob) -> None:
    job = open_job.start(3, *LONG, "--redundancy", "none").add("a", "b", "c")
    job.wait_for_step(1)
    command = [sys.executable, "-m", "megatron_bamboo", "drain", "b", "--job-dir", str(job.job_dir)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS)
    assert ended.returncode == 2
    assert ended.stderr == (
        "bamboo drain: b stays: with --bamboo-redundancy none no stage can move\n"
    )


def stopped(job: Launch, *options: str) -> subprocess.CompletedProcess[str]:
    """What ``bamboo stop`` says of a running job, which has ended then."""
    command = [sys.executable, "-m", "megatron_bamboo", "stop", *options, str(job.job_dir)]
    return subprocess.run(command, check=True, capture_output=True, text=True)


@pytest.mark.parametrize("options", [(), ("--save",)], ids=["at once", "saved"])
def test_a_job_of_this_machine_is_stopped(launch: Launch, options: tuple[str, ...]) -> None:
    launch.start(3, *LONG).wait_for_step(2)
    said = stopped(launch, *options)
    launch.wait(6)
    assert re.fullmatch(
        r"stopped after step \d+ of 100000 \(bamboo stop\); it has no checkpoint\n", said.stdout
    )
    assert said.stderr == (UNSAVED if options else "")
    assert launch.err == f"bamboo run: {said.stdout}"


def test_what_cannot_be_stopped_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, "stop", str(tmp_path))
    assert line == f"bamboo stop: JOB_DIR {tmp_path}: no job runs there; give the folder of one"
    for seconds in ("nan", "inf", "-1"):
        assert f"not {seconds}" in refused(capsys, "stop", str(tmp_path), "--wait", seconds)


def test_without_a_folder_the_job_to_stop_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    line = refused(capsys, "stop")
    assert line == "bamboo stop: say with JOB_DIR which job; running in runs/: none"


def refused(capsys: pytest.CaptureFixture[str], *command: str) -> str:
    """The line with which a command is refused."""
    assert bamboo(list(command)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def coordinator(folder: Path, *options: str) -> tuple[str, ...]:
    script = Path(__file__).with_name("fake_training.py")
    return ("coordinator", "--job-dir", str(folder), "--nodes", "3", *options, str(script))


def test_where_a_coordinator_cannot_listen_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as busy:
        port = str(busy.getsockname()[1])
        assert refused(capsys, *coordinator(tmp_path, "--port", port)) == (
            f"bamboo coordinator: --port {port} on 127.0.0.1 is busy: give another, or none"
        )
    for host, why in (
        ("no-such-name.invalid", "--host no-such-name.invalid does not resolve"),
        ("0.0.0.0", "--host 0.0.0.0: nobody can reach that"),
        ("192.0.2.1", "--host 192.0.2.1 --port 0: cannot listen there"),
    ):
        assert why in refused(capsys, *coordinator(tmp_path, "--host", host))


def test_what_an_agent_cannot_join_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("BAMBOO_SECRET", raising=False)
    where, soon = str(tmp_path / ADDRESS_FILE), ("--deadline", "0.3")
    for options, why in (
        (("--join", where, *soon), f"there is no {where}: was its bamboo coordinator started?"),
        (("--join", "no-such-name.invalid:9"), "no-such-name.invalid does not resolve"),
        (("--join", "127.0.0.1:9"), "needs the job's secret: give --secret-file"),
        (("--join", where, "--node", "a/b"), "--node a/b: a node's name is of letters, digits"),
        (("--join", where, "--node", "coordinator"), "--node coordinator: files of the job"),
        (("--join", where, "--node", ""), "--node '': a node's name is of letters, digits"),
        (("--join", where, "--interface", "none0"), "--interface none0: this machine has lo"),
    ):
        assert why in refused(capsys, "agent", *options)


@pytest.mark.parametrize("content", [b"{}", b"[1]", b'{"host": "a", "port": "b"}', b"x", b"\xff"])
def test_a_file_that_does_not_say_where_a_coordinator_is_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes
) -> None:
    other = tmp_path / "job.json"
    other.write_bytes(content)
    line = refused(capsys, "agent", "--join", str(other))
    assert line.startswith(f"bamboo agent: {other} does not say where a coordinator is")


def test_an_agent_looks_again_where_nobody_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / SECRET_FILE).write_text("5" * 64)
    (tmp_path / SECRET_FILE).chmod(0o600)
    address = {"host": "127.0.0.1", "port": 1, "generation": 1, "pid": 1}
    (tmp_path / ADDRESS_FILE).write_text(json.dumps(address))
    line = refused(capsys, "agent", "--join", str(tmp_path), "--deadline", "0.3")
    assert line.startswith("bamboo agent: no coordinator of this job answers (")
