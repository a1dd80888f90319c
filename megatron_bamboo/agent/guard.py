"""A node's guard: ends all that is left of a node whose agent has died.

The kernel ends an agent's workers with it, but not what they have started: a data loader's
processes, a compiler. Nobody else on the node knows of them. So each agent has a small process in
its group that waits for its end, and then ends the group.
"""

import os
import resource
import signal
from typing import NoReturn

from megatron_bamboo.agent.process import blocked_interrupts, notify_of_parents_death

_LINK = 3


def start_guard() -> None:
    """Start the guard of this process's group; call it once, in the group's leader.

    What ties them together is a pipe that only this process holds open, without ever writing.
    """
    link, _held = os.pipe()
    with blocked_interrupts():
        if os.fork() == 0:
            _guard(link)
    os.close(link)


def _guard(link: int) -> NoReturn:
    try:
        for ignored in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)
        # Whoever stopped the whole group has stopped this process too.
        notify_of_parents_death(signal.SIGCONT)
        os.dup2(link, _LINK)
        os.closerange(_LINK + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        os.read(_LINK, 1)
        os.killpg(os.getpgrp(), signal.SIGKILL)
    finally:
        os._exit(1)
