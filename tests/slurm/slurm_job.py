"""A job that the scripts of ``scripts/slurm`` start on a test's Slurm."""

import json
import os
import sys
from pathlib import Path
from typing import Any

from slurm_cluster import ROOT, STABLE, SlurmCluster

from megatron_bamboo.observe.events import read_events

THESE = {
    "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
    "PYTHONPATH": str(ROOT),
}
"""Where `bamboo` and `python` are those of the tests."""
TOY = ROOT / "tests" / "agent" / "fake_training.py"


class SlurmJob:
    """One job; its coordinator runs when this is made.

    Args:
        train: the command that trains, as coordinator.sbatch wants it.
    """

    def __init__(self, cluster: SlurmCluster, folder: Path, train: str) -> None:
        self._cluster = cluster
        self.job_dir = folder / "job"
        self._variables = {"JOB_DIR": str(self.job_dir), **THESE}
        told = {"TRAIN": train, "HOST": "127.0.0.1"}
        self.coordinator = self.submit("coordinator.sbatch", told, "-w", STABLE)

    def submit(self, script: str, variables: dict[str, str], *options: str) -> str:
        """Submit one of the scripts for this job; its id in Slurm."""
        return self._cluster.submit(
            f"scripts/slurm/{script}", self._variables | variables, *options
        )

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The events of a kind that the coordinator has told so far."""
        folder = self.job_dir / "events"
        events = read_events(folder) if folder.is_dir() else []
        return [e for e in events if e["event"] == kind and e["source"] == "coordinator"]

    def steps(self) -> list[int]:
        """The steps that have passed, in the order in which they were said."""
        return [loss["step"] for loss in losses_of(self.job_dir)]

    def stages(self) -> list[str]:
        """Who runs the stages now."""
        pipelines = self._newest("plan", "changed")["pipelines"]
        return [node for pipeline in pipelines for node in pipeline["stages"]]

    def joined(self) -> set[str]:
        """The nodes that have ever joined."""
        return {event["node"] for event in self.events("agent_joined")}

    def wait_for_steps(self, number: int) -> None:
        """Wait until so many more steps have passed."""
        before = len(self.steps())
        self._cluster.until(lambda: len(self.steps()) >= before + number, "more steps")

    def outcome(self) -> dict[str, Any]:
        """How the job ended."""
        file = self.job_dir / "outcome.json"
        self._cluster.until(file.exists, "outcome")
        values: dict[str, Any] = json.loads(file.read_text())
        return values

    def _newest(self, *kinds: str) -> dict[str, Any]:
        events = [event for kind in kinds for event in self.events(kind)]
        return max(events, key=lambda event: float(event["time"]))


def losses_of(job_dir: Path) -> list[dict[str, Any]]:
    """The losses in a job folder, each with its step."""
    file = job_dir / "losses.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines]


def toy(folder: Path, nodes: int, *options: str) -> str:
    """A command that trains nothing, on so many nodes."""
    train = folder / "train.sh"
    words = " ".join((str(TOY), *options))
    train.write_text(f"exec bamboo $BAMBOO_LAUNCH --nodes {nodes} {words}\n")
    return f"bash {train}"
