"""A real Slurm on this machine: a controller, and nodes that can be killed like machines.

Each node's slurmd is the first process of a PID namespace of its own, so that one SIGKILL takes all
that runs on the node, whatever it has started. Nothing outside its folder and its ports is touched.
"""

import contextlib
import os
import re
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    "slurmctld": "slurmctld",
    "slurmd": "slurmd",
    "sbatch": "slurm-client",
    "munged": "munge",
    "unshare": "util-linux",
}
"""By program the package in which Debian has it."""
STABLE = "node1"
START_SECONDS = 120.0
COMMAND_SECONDS = 60.0
LOOK_SECONDS = 0.2
SETTLE_SECONDS = 3.0

CONFIGURATION = """
ClusterName=test
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd-%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd-%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
MpiDefault=none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
SwitchType=switch/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
SchedulerType=sched/builtin
SchedulerParameters=batch_sched_delay=1,sched_interval=2,sched_min_interval=100000
SlurmdTimeout=10
InactiveLimit=0
KillWait=30
WaitTime=0
ReturnToService=2
JobRequeue=1
MessageTimeout=60
TreeWidth=16
SlurmdParameters=config_overrides
NodeName=node[1-{nodes}] NodeHostname=localhost NodeAddr=127.0.0.1 Port=[{first}-{last}] CPUs=2 \
RealMemory=4000 State=UNKNOWN
PartitionName=stable Nodes=node1 Default=YES MaxTime=INFINITE State=UP
PartitionName=spot Nodes=node[2-{nodes}] MaxTime=INFINITE State=UP
"""


class SlurmCluster:
    """``node1`` is of the partition ``stable``, all others are of ``spot``."""

    def __init__(self, folder: Path, num_nodes: int) -> None:
        self._folder = folder
        self._nodes = [f"node{number}" for number in range(1, num_nodes + 1)]
        port = 17000 + os.getpid() % 500 * 20
        for name in ("state", "log", *(f"spool/{node}" for node in self._nodes)):
            (folder / name).mkdir(parents=True)
        configuration = CONFIGURATION.format(
            folder=folder, port=port, nodes=num_nodes, first=port + 1, last=port + num_nodes
        )
        (folder / "slurm.conf").write_text(configuration.lstrip())
        self._environment = os.environ | {"SLURM_CONF": str(folder / "slurm.conf")}
        self._daemons: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        """Start all daemons, and wait until all nodes are idle."""
        self._start_munge()
        self._start("slurmctld", "slurmctld", "-D", "-c")
        for node in self._nodes:
            self.start_node(node)
        self.until(lambda: self.states() == dict.fromkeys(self._nodes, "idle"), "idle nodes")

    def start_node(self, node: str) -> None:
        """Start a node that does not run."""
        machine = ("unshare", "--pid", "--mount", "--fork", "--mount-proc", "--kill-child=SIGKILL")
        self._start(node, *machine, "slurmd", "-D", "-N", node)

    def kill_node(self, node: str) -> None:
        """Take a machine away, with all that runs on it; Slurm may take half a minute to see it."""
        self._end(node)

    def say_down(self, node: str) -> None:
        """Let Slurm know at once of a machine that is gone."""
        self.run("scontrol", "update", f"nodename={node}", "state=down", "reason=killed")

    def start_requeued(self, job: str) -> None:
        """Start a job, or task, that was requeued and is held for two minutes."""
        self.until(lambda: self.queue(job) == ["PENDING"], f"requeue of {job}")
        # A node refuses what it was told to kill in the same second; that is what the hold is for.
        time.sleep(SETTLE_SECONDS)
        self.run("scontrol", "update", f"jobid={job}", "starttime=now")

    def submit(self, script: str, variables: Mapping[str, str], *options: str) -> str:
        """Submit a script of the repository; the job's id."""
        folder = str(self._folder / "%x-%j.log")
        command = ("sbatch", "--parsable", "--output", folder, *options, script)
        return self.run(*command, variables=variables).strip()

    def run(self, *command: str, variables: Mapping[str, str] | None = None) -> str:
        """What a command of Slurm's says."""
        done = subprocess.run(
            command,
            cwd=ROOT,
            env={**self._environment, **(variables or {})},
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )
        assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
        return done.stdout

    def states(self) -> dict[str, str]:
        """By node what Slurm says of it."""
        return dict(line.split() for line in self.run("sinfo", "-hN", "-o", "%N %T").splitlines())

    def task_on(self, node: str) -> str:
        """The id of the job, or task of an array, that runs on a node.

        Not its number: that of one task is the array's, too.
        """
        return self.run("squeue", "-h", "-w", node, "-t", "running", "-o", "%i").strip()

    def node_of(self, job: str) -> str:
        """The node that a job, or task of an array, runs on."""
        return self.run("squeue", "-h", "-j", job, "-o", "%N").strip()

    def queue(self, job: str) -> list[str]:
        """The states of a job's tasks that have not ended."""
        return self.run("squeue", "-hr", "-j", job, "-o", "%T").split()

    def exit_status(self, job: str) -> str:
        """How a job ended, as Slurm remembers it: ``STATE STATUS``."""
        shown = self.run("scontrol", "show", "job", job)
        found = re.search(r"JobState=(\S+)", shown), re.search(r"ExitCode=(\d+)", shown)
        return " ".join(match[1] for match in found if match)

    def until(self, condition: Callable[[], Any], what: str, seconds: float = START_SECONDS) -> Any:
        """Wait for a condition, and return what it returned."""
        until = time.monotonic() + seconds
        while not (value := condition()):
            assert time.monotonic() < until, f"no {what} within {seconds:g} s\n{self.last_words()}"
            time.sleep(LOOK_SECONDS)
        return value

    def last_words(self) -> str:
        """The ends of all logs."""
        logs = sorted((*self._folder.glob("*.log"), *self._folder.glob("log/*")))
        return "\n".join(
            "\n".join([f"--- {log}", *log.read_text(errors="replace").splitlines()[-12:]])
            for log in logs
        )

    def close(self) -> None:
        """End everything."""
        with contextlib.ExitStack() as ends:
            for name in self._daemons:
                ends.callback(self._end, name)

    def _start_munge(self) -> None:
        folder, key = self._folder, self._folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        files = {"socket": "munge.socket", "pid-file": "munge.pid", "log-file": "log/munge.log"}
        files |= {"key-file": "munge.key", "seed-file": "munge.seed"}
        options = [f"--{name}={folder / file}" for name, file in files.items()]
        self._start("munged", "munged", "--foreground", "--force", "--num-threads=2", *options)
        self.until((folder / "munge.socket").exists, "munge socket")

    def _start(self, name: str, *command: str) -> None:
        with (self._folder / "log" / f"{name}.out").open("ab") as output:
            self._daemons[name] = subprocess.Popen(
                command,
                cwd=self._folder,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        """Kill a daemon, and wait until all that it has started is gone.

        Of a node this kills the process that made the namespace, and with it its first one.
        """
        process = self._daemons[name]
        if process.poll() is not None:
            return
        namespace = os.readlink(f"/proc/{process.pid}/ns/pid_for_children")
        process.kill()
        process.wait()
        if namespace != os.readlink("/proc/self/ns/pid"):
            self.until(lambda: not any(map(partial(_is_in, namespace), _processes())), "end")


def _processes() -> Iterator[Path]:
    return Path("/proc").glob("[0-9]*")


def _is_in(namespace: str, process: Path) -> bool:
    """Whether a process is in a PID namespace."""
    with contextlib.suppress(OSError):  # gone, or of a stranger
        return os.readlink(process / "ns" / "pid") == namespace
    return False


@contextlib.contextmanager
def slurm_cluster(num_nodes: int) -> Iterator[SlurmCluster]:
    """A cluster for the time of a test. Its folder has a short name, for its socket's sake."""
    with tempfile.TemporaryDirectory(prefix="bs-", ignore_cleanup_errors=True) as folder:
        Path(folder).chmod(0o755)
        cluster = SlurmCluster(Path(folder), num_nodes)
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.close()
