"""``bamboo run`` as the tests start it, and what it leaves behind."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megatron_bamboo.observe.events import read_events

SCRIPT = Path(__file__).with_name("fake_training.py")
WAIT_SECONDS = 30


def processes_of(groups: set[int]) -> list[psutil.Process]:
    """The processes of these process groups, zombies included."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) in groups:
                found.append(process)
        except ProcessLookupError:
            continue
    return found


class Launch:
    """``bamboo run`` as a process, its output in files."""

    def __init__(self, tmp_path: Path) -> None:
        self.job_dir = tmp_path / "job"
        self._out, self._err = tmp_path / "out.txt", tmp_path / "err.txt"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, nodes: int, *script_args: str, options: tuple[str, ...] = ()) -> "Launch":
        command = [sys.executable, "-m", "megatron_bamboo", "run", "--nodes", str(nodes)]
        command += ["--job-dir", str(self.job_dir), *options, str(SCRIPT), *script_args]
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self._process = subprocess.Popen(
                command, stdout=out, stderr=err, start_new_session=True
            )
        return self

    @property
    def process(self) -> subprocess.Popen[bytes]:
        assert self._process is not None
        return self._process

    def wait(self, status: int) -> "Launch":
        """Wait for the launcher's end with this status; nothing of the job may be left."""
        ended = self.process.wait(WAIT_SECONDS)
        assert ended == status, f"status {ended}:\n{self.out}\n{self.err}"
        assert processes_of(self.groups()) == []
        return self

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def events(self, kind: str) -> list[dict[str, Any]]:
        events = read_events(self.job_dir / "events")
        return [event for event in events if event["event"] == kind]

    def until(self, condition: Callable[[], Any]) -> Any:
        """Wait for a condition and return what it returned."""
        until = time.monotonic() + WAIT_SECONDS
        while not (value := condition()):
            assert time.monotonic() < until and self.process.poll() is None, self.out + self.err
            time.sleep(0.01)
        return value

    def log(self, node: str) -> str:
        return (self.job_dir / "logs" / f"{node}.log").read_text()

    def agents(self) -> dict[str, int]:
        """By node the process id of its agent, which is its process group."""
        return {event["node"]: event["pid"] for event in self.events("agent_joined")}

    def workers(self) -> dict[str, int]:
        return {event["node"]: event["pid"] for event in self.events("worker_started")
                if event["source"] == "coordinator"}  # fmt: skip

    def groups(self) -> set[int]:
        return set(self.agents().values())

    def iterations(self) -> list[int]:
        lines = [line for line in self.out.splitlines() if "] iteration " in line]
        return [int(line.split("iteration")[1].split("/")[0]) for line in lines]

    def wait_for_step(self, step: int) -> None:
        self.until(lambda: step in self.iterations())

    def clean(self) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for group in self.groups():
            if processes_of({group}):
                os.killpg(group, signal.SIGKILL)
