"""``bamboo run`` that loses a node and its coordinator, as status and metrics show it."""

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from launching import Launch
from prometheus_client.parser import text_string_to_metric_families

from megatron_bamboo.watching.status import JobStatus
from megatron_bamboo.watching.store_view import StoreWatcher
from megatron_bamboo.watching.summary import status_of

pytestmark = pytest.mark.multiprocess

Values = dict[str, float]


def metrics(url: str) -> Values:
    """What a scrape finds, by the text of its name and labels."""
    with urllib.request.urlopen(url, timeout=30) as answer:
        families = text_string_to_metric_families(answer.read().decode())
    return {
        s.name + "".join(f"/{label}" for label in s.labels.values()): s.value
        for family in families
        for s in family.samples
    }


def metrics_url(launch: Launch) -> str:
    """Where the launcher said that they are."""
    found = re.findall(r"^metrics: (http://127\.0\.0\.1:\d+/metrics)$", launch.out, re.MULTILINE)
    (url,) = found
    return str(url)


def status_command(job_dir: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "megatron_bamboo", "status", str(job_dir), *options]
    environment = os.environ | {"COLUMNS": "120"}
    return subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=environment
    )


def is_healed(status: JobStatus) -> bool:
    return status.totals.changes == 1 and not status.unprotected


def test_a_loss_is_seen_in_both_until_its_stages_have_replicas_again(launch: Launch) -> None:
    faults = ("--inject", "node1@iter3:1.0F0", "--inject", "coordinator@after:plan/1")
    launch.start(
        3, "--iters", "12", "--pause", "0.1", options=(*faults, "--metrics-port", "0")
    ).wait_for_step(1)
    url = metrics_url(launch)
    watcher, seen, scraped = StoreWatcher(launch.job_dir), [], []
    until = time.monotonic() + 60
    while not (seen and is_healed(seen[-1])):
        assert time.monotonic() < until, seen[-1]
        scraped.append(metrics(url))
        seen.append(status_of(watcher.look()))
        time.sleep(0.05)
    scraped.append(metrics(url))
    shown = status_command(launch.job_dir, "--once")

    # Whole, then stages 1 and 2 with one holder, then whole again: and so say both.
    shapes = [tuple((stage, place.node) for _, stage, place in s.unprotected) for s in seen]
    assert list(dict.fromkeys(shapes)) == [(), ((1, "node0"), (2, "node2"))]
    assert (shapes[0], shapes[-1]) == ((), ())
    alone = [values["bamboo_stages_without_replica"] for values in scraped]
    assert (alone[0], max(alone), alone[-1]) == (0, 2, 0)
    assert all(place.since_step == 0 for place in seen[0].pipelines[0])
    assert [place.since_step for place in seen[-1].pipelines[0]][1:] > [2, 2]

    # A new coordinator leads since: no counter has fallen.
    assert (scraped[0]["bamboo_coordinator_generation"], seen[-1].totals.takeovers) == (1, 1)
    counters = [name for name in scraped[0] if name.partition("/")[0].endswith("_total")]
    for name in counters:
        values = [scrape[name] for scrape in scraped]
        assert values == sorted(values), name
    last = scraped[-1]
    assert last["bamboo_coordinator_generation"] == 2
    assert last["bamboo_node_losses_total/connection"] == last["bamboo_takeovers_total"] == 1
    assert last["bamboo_planned_changes_total"] == 1
    assert (last["bamboo_nodes"], last["bamboo_step_seconds"]) == (2, 0.25)

    assert shown.returncode == 0, shown.stderr
    assert "coordinator 2 (process " in shown.stdout
    assert "every stage has two holders" in shown.stdout
    assert "lost so far 1, drained 0, returned 0; takeovers 1, planned changes 1" in shown.stdout
    launch.wait(0)
    ended = json.loads(status_command(launch.job_dir, "--json").stdout)
    assert (ended["phase"], ended["ending"], ended["progress"]["step"]) == ("ended", "finished", 12)


def test_status_says_that_a_job_was_interrupted_or_failed(launch: Launch, tmp_path: Path) -> None:
    options = ("--metrics-port", "0")
    launch.start(3, "--iters", "500", "--pause", "0.05", options=options).wait_for_step(1)
    url = metrics_url(launch)
    assert metrics(url)["bamboo_steps_total"] >= 1
    launch.process.send_signal(signal.SIGINT)
    launch.wait(130)
    with pytest.raises(OSError, match="refused"):
        metrics(url)
    assert "job: interrupted\n" in status_command(launch.job_dir).stdout
    second = Launch(tmp_path / "second")
    (tmp_path / "second").mkdir()
    try:
        second.start(2, "--stages", "2", "--redundancy", "none", "--misbehave", "node1:raise@2")
        second.wait(3)
        shown = status_command(second.job_dir)
    finally:
        second.clean()
    # Where the line is wrapped depends on how long the job's folder is.
    headline = " ".join(shown.stdout.split())
    assert "ended with a stage that no live node holds: pipeline 0: stage 1" in headline


def test_on_a_terminal_it_follows_the_job_to_its_end(launch: Launch) -> None:
    launch.start(3, "--iters", "100000", "--pause", "0.05").wait_for_step(1)
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "megatron_bamboo", "status", str(launch.job_dir)]
    environment = os.environ | {"TERM": "xterm"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment
    ) as process:
        os.close(theirs)
        shown, is_stopped = "", False
        for part in shown_on(ours):
            shown += part
            if "running" in shown and not is_stopped:
                launch.process.send_signal(signal.SIGINT)
                is_stopped = True
        assert process.wait(60) == 0
    os.close(ours)
    launch.wait(130)
    # Where a line is wrapped depends on how long the job's folder is.
    text = " ".join(shown.split())
    assert text.index("job: running") < text.rindex("job: interrupted") < text.rindex(" of 100000")


def shown_on(terminal: int) -> Iterator[str]:
    """What comes to a terminal, without colours and the like, until its other side is closed."""
    until = time.monotonic() + 60
    while select.select([terminal], [], [], until - time.monotonic())[0]:
        try:
            part = os.read(terminal, 65536)
        except OSError:  # as the end of the other side reads
            return
        yield re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", part.decode(errors="replace"))
    raise TimeoutError("it shows nothing any more, and does not end")


def test_no_job_is_one_line_and_status_2(tmp_path: Path) -> None:
    for options in ((), ("--once",), ("--json",)):
        refused = status_command(tmp_path / "none", *options)
        assert (refused.returncode, refused.stdout) == (2, "")
        assert re.fullmatch(
            r"bamboo status: there is no job in \S+: give the folder .*\n", refused.stderr
        )


def test_a_busy_metrics_port_ends_it_before_anything_is_begun(launch: Launch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        launch.start(3, options=("--metrics-port", str(port))).process.wait(60)
    assert launch.process.returncode == 2
    assert launch.err == (
        f"bamboo run: --metrics-port {port}: the port is taken: give another, or 0 for any free "
        "one\n"
    )
    assert not launch.job_dir.exists()
