"""What a machine must be before it joins a job as a node: like the others, and able to be one.

The flags are the job's own, for they come with the invitation. Code and data are this machine's,
so they are compared; and index caches that it does not see are built before anyone counts on it.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from megatron_bamboo.agent.environment import prepare_environment
from megatron_bamboo.agent.interfaces import check_interface
from megatron_bamboo.agent.invitation import Invitation, difference_here
from megatron_bamboo.agent.limits import (
    allow_descriptors,
    allow_locked_memory,
    worker_descriptors,
)
from megatron_bamboo.agent.marks import Marks
from megatron_bamboo.agent.preparing import python
from megatron_bamboo.agent.process import blocked_interrupts, spawn
from megatron_bamboo.errors import UserError

LOOK_SECONDS = 0.1


@dataclass(frozen=True, slots=True)
class Machine:
    """What a machine brings along that wants to be a node."""

    name: str
    code: Marks
    """Of the code that this process runs."""
    interface: str | None = None
    """In place of the one that the job names."""
    job_dir: Path | None = None
    """In place of the job's folder, which it does not see."""


def admit(
    text: bytes,
    machine: Machine,
    check_is_needed: Callable[[], None],
    say: Callable[[str], None],
) -> Invitation:
    """What a node of this machine is told, once it is fit to be one.

    Args:
        text: the job's invitation.
        check_is_needed: called again and again while there is something to wait for; raises where
            it has become needless.

    Raises:
        UserError: it does not see what all nodes must see, or differs from them.
    """
    told = json.loads(text)
    for folder in (machine.job_dir or told["job_dir"], told["directory"]):
        if not Path(folder).is_dir():
            raise UserError(f"this machine does not see {folder}, which all nodes must see")
    if (other := difference_here(text, machine.code)) is not None:
        raise UserError(f"this machine's code or data are not the job's: {other}")
    # Of other code there is no other word: it was changed while the coordinator or this one began.
    try:
        invitation = Invitation.from_json(text)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError("the job's coordinator runs another version of this package") from error
    if machine.job_dir is not None:
        invitation = replace(invitation, job_dir=str(machine.job_dir))
    if machine.interface is None and invitation.shape.interface is not None:
        check_interface("--bamboo-interface", invitation.shape.interface)
    allow_descriptors(worker_descriptors(invitation.shape), "a worker")
    if (warning := allow_locked_memory()) is not None:
        say(warning)
    _build_indices(invitation, check_is_needed, say)
    return invitation


def _build_indices(
    invitation: Invitation, check_is_needed: Callable[[], None], say: Callable[[str], None]
) -> None:
    """Build the index caches of the data unless they are there; UserError where that fails."""
    shape = invitation.shape
    if shape.indices is None or Path(invitation.directory, shape.indices).is_dir():
        return
    say(f"builds the index caches of its data in {shape.indices} before it joins")
    nodes, workers = shape.arrangement.num_nodes, shape.tensor_size
    environment = prepare_environment(Path(invitation.job_dir), nodes, workers, phase="index")
    with contextlib.chdir(invitation.directory):
        process = spawn(python(invitation.command), environment, new_session=True)
    try:
        # However long it takes, nobody waits for this machine meanwhile; the job's end ends it.
        while (status := process.poll()) is None:
            check_is_needed()
            time.sleep(LOOK_SECONDS)
    finally:
        with blocked_interrupts():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    if status != 0:
        raise UserError(
            f"the index caches of the data could not be built in {shape.indices} (status {status})"
        )
