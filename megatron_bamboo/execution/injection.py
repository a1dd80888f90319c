"""A fault at an exact moment: this node dies just before one action, or one moment of a save."""

import os
import re
import signal

from megatron_bamboo.checkpoint.moments import BeforeFault, Fault, parse_fault
from megatron_bamboo.observe.events import EventLog


def kill_before(text: str, events: EventLog) -> BeforeFault:
    """What is called before each action and moment; ``text`` is like ``iter7:2.0B3``, or empty.

    The whole process group gets a SIGKILL: nothing is flushed, closed or said to anyone.
    """
    if not text:
        return lambda action, step: None
    found = re.fullmatch(r"iter([0-9]+):(.*)", text)
    if found is None:
        raise ValueError(f"{text!r} is no fault: write iterN:ACTION, like iter7:2.0B3")
    fatal = (parse_fault(found[2]), int(found[1]))

    def die_there(action: Fault, step: int) -> None:
        if (action, step) == fatal:
            events.emit("kill", action=str(action), step=step)
            os.killpg(os.getpgrp(), signal.SIGKILL)

    return die_there
