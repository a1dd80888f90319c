"""Process groups between threads of one process, and operations that run beside a test."""

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from megatron_bamboo.execution.groups import GlooGroup

TIMEOUT = timedelta(seconds=20)


class Beside:
    """A call in a thread of its own, and how it ended."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self._function = function
        self._args = args
        self._result: Any = None
        self.error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def is_under_way(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def join(self, seconds: float = 20) -> Any:
        """Its result; what it raised is raised here."""
        self._thread.join(seconds)
        assert not self._thread.is_alive(), "it did not end"
        if self.error is not None:
            raise self.error
        return self._result

    def _run(self) -> None:
        try:
            self._result = self._function(*self._args)
        except BaseException as error:  # raised in join()
            self.error = error


def make_groups(
    *members: str, name: str = "group", store: dist.Store | None = None
) -> dict[str, GlooGroup]:
    """Every member's end of one group."""
    meeting = store or dist.HashStore()
    making = {me: Beside(GlooGroup, meeting, name, members, me, TIMEOUT) for me in members}
    return {me: call.join() for me, call in making.items()}
