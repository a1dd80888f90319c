"""``patch()``: Megatron-core's ``get_forward_backward_func`` returns this project's schedule."""

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from types import TracebackType
from typing import Any

from megatron_bamboo.quiet import quiet_megatron_import

with quiet_megatron_import():
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import schedules

    from megatron_bamboo.execution.megatron_schedule import MegatronSchedule
    from megatron_bamboo.model import cpu

_NAME = "get_forward_backward_func"


class Patch(AbstractContextManager["Patch"]):
    """The change that ``patch()`` made; as a context manager it undoes itself at the end."""

    def __init__(self, replacement: Callable[..., Any]) -> None:
        original = getattr(schedules, _NAME)
        self._original = original
        # Also where a script has imported it by its name.
        self._changed = [
            (module, name)
            for module in list(sys.modules.values())
            for name, value in list(getattr(module, "__dict__", {}).items())
            if value is original
        ]
        for module, name in self._changed:
            setattr(module, name, replacement)

    def undo(self) -> None:
        """Put Megatron's own function back everywhere; a second time nothing happens."""
        for module, name in self._changed:
            setattr(module, name, self._original)
        self._changed.clear()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.undo()


def patch(timeout: timedelta = timedelta(minutes=10)) -> Patch:
    """Let ``get_forward_backward_func`` return this project's schedule, until it is undone.

    For Megatron's own training loop, on its own groups; a model in one stage is Megatron's to run.
    On a machine without a GPU, torch answers for CUDA with the CPU from then on.

    Args:
        timeout: the longest wait for a neighbour's message.

    Raises:
        RuntimeError: it is patched already.
    """
    megatrons = getattr(schedules, _NAME)
    if getattr(megatrons, "is_megatron_bamboos", False):
        raise RuntimeError("get_forward_backward_func is patched already: undo() that patch first")
    cpu.install()
    schedule = MegatronSchedule(timeout)

    def get_forward_backward_func(
        pp_size: int | None = None, vp_size: int | None = None
    ) -> Callable[..., Any]:
        """As Megatron's function of this name."""
        if pp_size is None and vp_size is None:
            pp_size = parallel_state.get_pipeline_model_parallel_world_size()
        if pp_size == 1:
            function: Callable[..., Any] = megatrons(pp_size, vp_size)
            return function
        return schedule

    get_forward_backward_func.is_megatron_bamboos = True  # type: ignore[attr-defined]
    return Patch(get_forward_backward_func)
