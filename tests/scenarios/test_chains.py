"""Loss after loss in one run, each healed before the next: no bit differs, nothing piles up.

One machine is lost again and again, each time in another life; the others must not notice in the
end.
"""

import json
import os
import signal
import time
from collections.abc import Mapping

import psutil
import pytest
from evidence import Expected
from forked_jobs import JOB_SECONDS, RunningJob
from in_ci import in_ci
from scenario_runner import SECONDS_PER_STEP, ScenarioRunner
from tiny_gpt import Shape

from megatron_bamboo.membership.lives import next_life

pytestmark = pytest.mark.multiprocess

# The job, with far more steps than the losses take, so that there is time to count; how often the
# machine is lost; after how many losses what is held is compared.
CASES = (
    (Shape(3, 1, num_steps=100), 4, (2, 4)),
    (Shape(3, 1, num_steps=220), 10, (2, 8)),
    (Shape(2, 2, num_steps=220, variant="zero-bf16"), 10, (2, 8)),
    (Shape(3, 1, num_steps=1800, num_mirrors=2), 50, (5, 50)),
)
SURVIVORS = ("node0", "node2")
# What gloo does not let go of at once it does at the groups' timeout.
FLAGS = ("--distributed-timeout-minutes", "0.2")
SETTLE_SECONDS = 1.5
RESPAWN_SECONDS = 0.1
Counts = dict[str, int]


def wait_until_it_has_a_place(job: RunningJob, node: str) -> int:
    """Wait until a change is made that gives a node a stage; its process group."""
    log = job.request.job_dir / "events" / "coordinator.jsonl"
    until = time.monotonic() + JOB_SECONDS
    while time.monotonic() < until:
        whole = log.read_text().rpartition("\n")[0]
        events = [json.loads(line) for line in whole.splitlines()]
        if any(e["event"] == "changed" and node in e["pipelines"][0]["stages"] for e in events):
            return next(e["pid"] for e in events
                        if (e["event"], e.get("node")) == ("agent_joined", node))  # fmt: skip
        assert not job.ended.is_set(), f"it ended before {node} had a place"
        time.sleep(0.05)
    raise TimeoutError(f"{node} never had a place")


def counts_of(pid: int) -> Counts:
    """What a process holds now."""
    opened = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        try:
            opened.append(os.readlink(f"/proc/{pid}/fd/{name}"))
        except FileNotFoundError:  # closed since it was listed
            continue
    process = psutil.Process(pid)
    return {
        "threads": process.num_threads(),
        "descriptors": len(opened),
        "sockets": sum(link.startswith("socket:") for link in opened),
        "processes": len(process.children(recursive=True)),
    }


def processes_of(job: RunningJob) -> dict[str, int]:
    """Those that are never lost: the launcher's and those of the other nodes."""
    known = {node: job.processes(node) for node in SURVIVORS}
    pids = {f"{n} {role}": known[n][role] for n in SURVIVORS for role in ("agent", "worker")}
    return {"launcher": job.pid, **pids}


def least_counts(processes: Mapping[str, int]) -> dict[str, Counts]:
    """By process the least of each that it is seen with for a moment: some is let go of soon."""
    until = time.monotonic() + SETTLE_SECONDS
    least = {name: counts_of(pid) for name, pid in processes.items()}
    while time.monotonic() < until:
        for name, pid in processes.items():
            least[name] = {what: min(n, least[name][what]) for what, n in counts_of(pid).items()}
        time.sleep(0.05)
    return least


def wait_for_no_more_than(most: Mapping[str, Counts], processes: Mapping[str, int]) -> None:
    """Wait until each of these processes has been seen with no more than it may hold."""
    until = time.monotonic() + JOB_SECONDS
    for name, pid in processes.items():
        while (now := counts_of(pid)) != {w: min(n, most[name][w]) for w, n in now.items()}:
            assert time.monotonic() < until, f"{name} holds {now}, which was {most[name]}"
            time.sleep(0.05)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", in_ci(CASES, CASES[0]), ids=str)
def test_losses_one_after_another(
    scenarios: ScenarioRunner, case: tuple[Shape, int, tuple[int, int]]
) -> None:
    shape, num_losses, counted_after = case
    lives = ["node1"]
    while len(lives) <= num_losses:
        lives.append(next_life(lives[-1]))
    job = scenarios.start(shape, "lazy", more_flags=FLAGS, respawn_seconds=RESPAWN_SECONDS)
    job.wait_for_step("node1", 2)
    processes, group, counts = processes_of(job), job.agents()["node1"], {}
    for number, life in enumerate(lives[1:], start=1):
        os.killpg(group, signal.SIGKILL)
        group = wait_until_it_has_a_place(job, life)
        if number == counted_after[0]:
            counts = least_counts(processes)
        if number == counted_after[1]:
            wait_for_no_more_than(counts, processes)
    joined = dict(zip(lives[1:], lives, strict=False))
    finished = job.finish(max(JOB_SECONDS, SECONDS_PER_STEP * shape.num_steps))
    assert scenarios.complaints(finished, Expected(shape, "lazy", lives[:-1], joined)) == []
