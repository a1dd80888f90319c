"""``bamboo run``, or a coordinator and agents, as the tests start them, and what they leave."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.observe.events import read_events

SCRIPT = Path(__file__).with_name("fake_training.py")
WAIT_SECONDS = 90


def is_over(process: psutil.Process) -> bool:
    """Whether it has ended, also since it was listed."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


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
        """End whatever is left."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        for group in self.groups():
            if processes_of({group}):
                os.killpg(group, signal.SIGKILL)


class OpenJob(Launch):
    """``bamboo coordinator`` and a ``bamboo agent`` for each node, as processes of their own."""

    def __init__(self, tmp_path: Path) -> None:
        super().__init__(tmp_path)
        self.folder = tmp_path
        self.nodes: dict[str, subprocess.Popen[bytes]] = {}
        self.standbys: dict[str, subprocess.Popen[bytes]] = {}

    def start(
        self,
        nodes: int,
        *script_args: str,
        options: tuple[str, ...] = (),
        before: tuple[str, ...] = (),
        script: Path = SCRIPT,
    ) -> "OpenJob":
        """Start the coordinator, or another one after its end.

        Args:
            before: a program that runs it.
        """
        command = ["coordinator", "--job-dir", str(self.job_dir), "--nodes", str(nodes)]
        command += [*options, str(script), *script_args]
        self._process = self._spawn("coordinator", command, before)
        return self

    def stand_by(self, nodes: int, *script_args: str, options: tuple[str, ...] = ()) -> str:
        """Start another coordinator, which waits; what it is called here."""
        name = f"standby{len(self.standbys)}"
        command = ["coordinator", "--job-dir", str(self.job_dir), "--nodes", str(nodes)]
        command += ["--standby", *options, str(SCRIPT), *script_args]
        self.standbys[name] = self._spawn(name, command)
        return name

    def add(self, *nodes: str, options: tuple[str, ...] = (), join: str = "") -> "OpenJob":
        """Start some nodes, which join by the job folder's file or whatever is said."""
        for node in nodes:
            where = join or str(self.job_dir / ADDRESS_FILE)
            command = ["agent", "--join", where, "--node", node]
            self.nodes[node] = self._spawn(node, [*command, *options])
        return self

    def end_of(self, node: str) -> int:
        """Wait for the end of a node's starting process; its status."""
        return self.nodes[node].wait(WAIT_SECONDS)

    @property
    def out(self) -> str:
        return self.said("coordinator")

    @property
    def err(self) -> str:
        return self.said("coordinator", "err")

    def said(self, who: str, stream: str = "out") -> str:
        """What the coordinator or a node's starting process has printed."""
        return (self.folder / f"{who}.{stream}").read_text()

    def clean(self) -> None:
        for process in (*self.nodes.values(), *self.standbys.values()):
            process.kill()
            process.wait()
        super().clean()

    def _spawn(
        self, name: str, command: list[str], before: tuple[str, ...] = ()
    ) -> subprocess.Popen[bytes]:
        whole = [*before, sys.executable, "-m", "megatron_bamboo", *command]
        streams = [(self.folder / f"{name}.{stream}").open("ab") for stream in ("out", "err")]
        with streams[0] as out, streams[1] as err:
            return subprocess.Popen(whole, stdout=out, stderr=err, start_new_session=True)
