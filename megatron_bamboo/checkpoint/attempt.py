"""The forked process in which a worker writes its part of a checkpoint, as the worker sees it."""

import json
import mmap
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from megatron_bamboo.agent.process import fork
from megatron_bamboo.checkpoint.child import Failure, Task, write
from megatron_bamboo.checkpoint.moments import BeforeMoment

_PAGE_BYTES = 4096
_LONGEST_REASON = 500
_REAP_SECONDS = 2.0


class SaveAttempt:
    """One writer's process; it ends with this process, and with the node.

    Args:
        make_before: makes the fault injection anew there, where no descriptor is inherited.
    """

    def __init__(
        self, task: Task, state: dict[str, Any], make_before: Callable[[], BeforeMoment]
    ) -> None:
        # Memory that both share is no descriptor that the fork could close.
        self._page = mmap.mmap(-1, _PAGE_BYTES)
        self._status: int | None = None
        self.ended_at = 0.0
        """When the end was noticed, on the monotonic clock."""
        self._pid = fork(lambda: self._write(task, state, make_before()))
        self._end = os.pidfd_open(self._pid)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; whether it has ended."""
        if self._status is None and select.select([self._end], [], [], seconds)[0]:
            _, status = os.waitpid(self._pid, 0)
            self._status = os.waitstatus_to_exitcode(status)
            self.ended_at = time.monotonic()
        return self._status is not None

    @property
    def failure(self) -> Failure | None:
        """Why an ended process failed, if it did."""
        if self._status == 0:
            return None
        said = self._page[:].rstrip(b"\0")
        if said:
            return Failure(**json.loads(said))
        return Failure(f"the writing process ended with status {self._status}", by_peer=False)

    def close(self) -> None:
        """Kill the process if it still runs.

        One that hangs in a file system cannot be killed; it ends when that lets it go.
        """
        if self._status is None:
            os.kill(self._pid, signal.SIGKILL)
            self.wait(_REAP_SECONDS)
        os.close(self._end)

    def _write(self, task: Task, state: dict[str, Any], before: BeforeMoment) -> int:
        try:
            write(task, state, lambda moment: before(moment, task.step))
        # Whatever it is: torch's CheckpointException is no Exception.
        except BaseException as error:
            failure = Failure.of(error)
            self._page.write(
                json.dumps(
                    asdict(Failure(failure.reason[:_LONGEST_REASON], failure.by_peer))
                ).encode()
            )
            return 1
        return 0
