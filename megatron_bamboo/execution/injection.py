"""A fault at an exact moment: this node dies just before one action of one step."""

import os
import re
import signal
from collections.abc import Callable

from megatron_bamboo.observe.events import EventLog
from megatron_bamboo.schedule.actions import Action


def kill_before(text: str, events: EventLog) -> Callable[[Action, int], None]:
    """What the executor calls before each action; ``text`` is like ``iter7:2.0B3``, or empty.

    The whole process group gets a SIGKILL: nothing is flushed, closed or said to anyone.
    """
    if not text:
        return lambda action, step: None
    found = re.fullmatch(r"iter([0-9]+):(.*)", text)
    if found is None:
        raise ValueError(f"{text!r} is no fault: write iterN:ACTION, like iter7:2.0B3")
    fatal = (Action.parse(found[2]), int(found[1]))

    def die_there(action: Action, step: int) -> None:
        if (action, step) == fatal:
            events.emit("kill", action=str(action), step=step)
            os.killpg(os.getpgrp(), signal.SIGKILL)

    return die_there
