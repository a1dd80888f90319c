"""Resilient pretraining with Megatron-core on nodes that can vanish at any moment."""

from datetime import timedelta
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron_bamboo.drop_in import Patch

__version__ = "0.1.0"


def patch(timeout: timedelta = timedelta(minutes=10)) -> "Patch":
    """Let Megatron-core's ``get_forward_backward_func`` return this project's schedule.

    See ``drop_in.py``, which is imported here since the command and the agents run without torch.
    """
    from megatron_bamboo import drop_in

    return drop_in.patch(timeout)
