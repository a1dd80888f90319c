"""A job's folder for a node that does not see the real one: what it needs of it comes from etcd.

Agent, workers and all who look for the coordinator read two files: where it listens, and how the
job has ended. Here a process beside the node copies them from etcd into a folder of this machine,
which also takes the node's log and events, so nobody else need know that they are copies.
"""

import contextlib
import os
import signal
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

from megatron_bamboo.agent.job import JOB_FILE
from megatron_bamboo.agent.outcome import OUTCOME_FILE
from megatron_bamboo.agent.process import ForkedProcess, blocked_interrupts, fork
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.etcd_client import EtcdAway
from megatron_bamboo.membership.etcd_reader import Bulletin
from megatron_bamboo.membership.store_place import EtcdPlace

LOOK_SECONDS = 0.5
ENDING_SECONDS = 0.01


class FarFolder:
    """The folder of one node.

    Args:
        path: empty, or of an earlier life of the node.

    Raises:
        UserError: it cannot be used, or is that of the job itself.
    """

    def __init__(self, place: EtcdPlace, path: Path) -> None:
        self._place = place
        self.path = path
        if (path / JOB_FILE).exists():
            raise UserError(
                f"--job-dir {path} is the job's own folder: give --join {path / ADDRESS_FILE}, or "
                "a folder for this node alone"
            )
        try:
            (path / "logs").mkdir(parents=True, exist_ok=True)
            for name in (ADDRESS_FILE, OUTCOME_FILE):
                (path / name).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(f"--job-dir {path} cannot be written to ({error.strerror})") from error

    @contextlib.contextmanager
    def kept(self) -> Iterator[None]:
        """Within it the folder is kept as etcd says."""
        with blocked_interrupts():
            copier = ForkedProcess(fork(self._keep))
        try:
            yield
        finally:
            copier.kill()
            while copier.poll() is None:
                time.sleep(ENDING_SECONDS)

    def check_trust(self) -> None:
        """UserError where etcd and this machine do not believe each other who they are.

        Else one would wait in vain, until the deadline. That etcd is not there yet is no error.
        """
        with contextlib.closing(Bulletin(self._place)) as bulletin:
            try:
                bulletin.look()
            except EtcdAway as error:
                if isinstance(error.__cause__, ssl.SSLError):
                    raise UserError(
                        f"--join {self._place}: {error}: give the files of that etcd"
                    ) from error

    def look(self) -> None:
        """Copy what etcd has now, if it answers."""
        with contextlib.closing(Bulletin(self._place)) as bulletin:
            self._copy(bulletin)

    def _keep(self) -> int:
        # What tells the node to end is not for its copier, which ends after it.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        bulletin = Bulletin(self._place)
        while True:
            self._copy(bulletin)
            time.sleep(LOOK_SECONDS)

    def _copy(self, bulletin: Bulletin) -> None:
        # While etcd is away, or this machine's disk full, what was copied last holds.
        with contextlib.suppress(OSError):
            address, outcome = bulletin.look()
            self._put(ADDRESS_FILE, address)
            self._put(OUTCOME_FILE, outcome)

    def _put(self, name: str, value: bytes | None) -> None:
        path = self.path / name
        if value is not None and (not path.exists() or path.read_bytes() != value):
            beside = path.with_name(f"{name}.{os.getpid()}")
            beside.write_bytes(value)
            beside.rename(path)
