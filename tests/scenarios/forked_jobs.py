"""The tests' side of the fork server: start jobs, wait for them, end those that hang."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from job_request import JobRequest, JobResult

from megatron_bamboo.observe.events import read_events

ROOT = Path(__file__).parents[2]
IMPORT_SECONDS = 120.0
JOB_SECONDS = 120.0
KILL_SECONDS = 10.0
SHOWN_LINES = 12


@dataclass(frozen=True, slots=True)
class FinishedJob:
    """What is left of a job."""

    request: JobRequest
    result: JobResult
    seconds: float

    @property
    def job_dir(self) -> Path:
        """Where the product has written."""
        return self.request.job_dir

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The product's events of one kind, by time."""
        events = read_events(self.job_dir / "events")
        return [event for event in events if event["event"] == kind]

    def identities(self) -> list[dict[str, Any]]:
        """The workers' processes at their start and at their end."""
        return read_events(Path(self.request.folder) / "processes")


class RunningJob:
    """A job under way."""

    def __init__(self, request: JobRequest) -> None:
        self.request = request
        self.started = threading.Event()
        self.ended = threading.Event()
        self.pid = 0
        self.began = time.monotonic()
        self.seconds = 0.0

    def events(self, kind: str) -> list[dict[str, Any]]:
        """The product's events of one kind, so far."""
        folder = self.request.job_dir / "events"
        return [e for e in read_events(folder) if e["event"] == kind] if folder.is_dir() else []

    def agents(self) -> dict[str, int]:
        """By node its process group."""
        return {event["node"]: event["pid"] for event in self.events("agent_joined")}

    def processes(self, node: str) -> dict[str, int]:
        """A node's process group, its agent's process and its worker's."""
        (worker,) = (e["pid"] for e in self.events("worker_started") if e["source"] == node)
        return {"group": -self.agents()[node], "agent": self.agents()[node], "worker": worker}

    def wake(self, node: str) -> None:
        """Let a stopped node go on."""
        os.killpg(self.agents()[node], signal.SIGCONT)

    def wait_for_step(self, node: str, step: int) -> None:
        """Wait until a node has done something in a step."""
        log, sign = self.request.job_dir / "events" / f"{node}.jsonl", f'"step": {step},'
        until = time.monotonic() + JOB_SECONDS
        while not (log.is_file() and sign in log.read_text()):
            if time.monotonic() > until or self.ended.is_set():
                raise RuntimeError(f"{node} never came to step {step}\n{last_words(self.request)}")
            time.sleep(0.002)

    def wait_for_event(self, kind: str) -> dict[str, Any]:
        """Wait until something of this kind has happened; the first."""
        until = time.monotonic() + JOB_SECONDS
        while not (events := self.events(kind)):
            if time.monotonic() > until or self.ended.is_set():
                raise RuntimeError(f"there was no {kind}\n{last_words(self.request)}")
            time.sleep(0.02)
        return events[0]

    @staticmethod
    def now() -> float:
        """The clock of the events."""
        return time.monotonic()

    def finish(self, seconds: float = JOB_SECONDS) -> FinishedJob:
        """Wait for the end; a job that takes longer is ended, with its last words in the error."""
        if not self.ended.wait(seconds):
            self._kill()
            raise TimeoutError(f"ended after {seconds:.0f} s\n{last_words(self.request)}")
        folder = Path(self.request.folder)
        if not (folder / "result.json").is_file():
            raise RuntimeError(f"the launching process failed\n{last_words(self.request)}")
        return FinishedJob(self.request, JobResult.read(folder), self.seconds)

    def _kill(self) -> None:
        """End the launching process: agents die with it, and workers with their agents."""
        if self.started.wait(KILL_SECONDS):
            os.kill(self.pid, signal.SIGKILL)
        if not self.ended.wait(KILL_SECONDS):
            raise TimeoutError(f"the job in {self.request.folder} cannot be ended")


class ForkServer:
    """Starts the fork server and speaks to it."""

    def __init__(self, data: Path) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {
            "PYTHONPATH": path,
            "OMP_NUM_THREADS": "1",
            "TOKENIZERS_PARALLELISM": "false",
        }
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("fork_server.py")), str(data)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        self._jobs: dict[str, RunningJob] = {}
        self._lock = threading.Lock()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def start(self, request: JobRequest) -> RunningJob:
        """Start a job; its folder must not be there yet."""
        Path(request.folder).mkdir(parents=True)
        job = RunningJob(request)
        assert self._process.stdin is not None
        with self._lock:
            self._jobs[request.folder] = job
            self._process.stdin.write(request.to_json().encode() + b"\n")
            self._process.stdin.flush()
        if not job.started.wait(IMPORT_SECONDS):
            raise TimeoutError("the fork server did not answer")
        return job

    def run(self, request: JobRequest) -> FinishedJob:
        """Start a job and wait for its end."""
        return self.start(request).finish()

    def close(self) -> None:
        """End the server, and with it whatever still runs."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(KILL_SECONDS)
        finally:
            self._process.kill()
            self._process.wait()
        self._reader.join(KILL_SECONDS)

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            answer = json.loads(line)
            job = self._jobs[answer["folder"]]
            if answer["event"] == "started":
                job.pid = answer["pid"]
                job.began = time.monotonic()
                job.started.set()
            else:
                job.seconds = time.monotonic() - job.began
                job.ended.set()
        # The server is gone, and so are its jobs.
        for job in list(self._jobs.values()):
            job.started.set()
            job.ended.set()


def last_words(request: JobRequest) -> str:
    """The ends of a job's logs."""
    logs = [Path(request.folder) / "launcher.log", *sorted(request.job_dir.glob("logs/*.log"))]
    return "\n".join(_tail(log) for log in logs if log.is_file())


def _tail(log: Path) -> str:
    lines: Sequence[str] = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
    return "\n".join([f"--- {log}", *lines])
