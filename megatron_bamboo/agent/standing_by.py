"""A coordinator beside the one that leads: it waits for its turn, and goes on in its place.

Two things say that a job is led: the lock on its folder, which the kernel of one machine keeps, and
in etcd the leader's office, which knows of other machines. Who has the lock and finds the office
free may lead; that exactly one does is the store's to see to, however many wait.
"""

import contextlib
import socket
import time
from collections.abc import Callable
from pathlib import Path

from megatron_bamboo.agent.job_folder import FolderHeld, held
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.leadership import Leader
from megatron_bamboo.membership.stopping import TOLD_TO_END
from megatron_bamboo.membership.stores import led_elsewhere

LOOK_SECONDS = 0.2
# Of a lease etcd says whole seconds only: an older one that is not renewed may seem so much newer.
RENEWED_SECONDS = 1.5


def await_turn(
    job_dir: Path,
    is_in_etcd: bool,
    stack: contextlib.ExitStack,
    must_end: Callable[[], bool],
    say: Callable[[str], None],
) -> Status | None:
    """Wait until nobody leads the job in a folder any more; then the folder is this process's.

    It waits as long as somebody else leads: that is what it is for.

    Args:
        is_in_etcd: the job's store is there, and not in the folder.
        stack: keeps the folder.
        must_end: whether this process's own time is over.

    Returns:
        What to end with where there is nothing left to lead, or no time for it; else None.

    Raises:
        UserError: it could not go on in the leader's place, or the folder cannot be used.
    """
    reason = _why_not_yet(job_dir, is_in_etcd, stack)
    if reason is not None:
        say(f"stands by: {reason}")
    while reason is not None:
        if must_end():
            say(f"{TOLD_TO_END}: ends without having led")
            return Status.STOPPED
        time.sleep(LOOK_SECONDS)
        # Who waits for another machine leaves the folder alone: whoever came just then would be
        # told that it is this process that leads.
        reason = _led_from_elsewhere(job_dir) or _why_not_yet(job_dir, is_in_etcd, stack)
    if (outcome := Outcome.read(job_dir)) is not None:
        say(f"the job in {job_dir} is over, with status {outcome.status:d}")
        return outcome.status
    return None


def check_nobody_leads_elsewhere(job_dir: Path) -> None:
    """Wait until a leader on another machine that has died is known to be dead.

    Raises:
        UserError: it lives.
    """
    first: Leader | None = None
    while (leader := _led_elsewhere(job_dir)) is not None:
        first = first or leader
        is_renewed = leader.beat > first.beat + RENEWED_SECONDS
        if is_renewed or leader.generation != first.generation:
            raise UserError(
                f"the job in {job_dir} has a coordinator already on another machine (coordinator "
                f"{leader.generation}, process {leader.pid} there): give another --job-dir for "
                "another job, or --standby to go on with this one when that is gone"
            )
        time.sleep(LOOK_SECONDS)


def _led_elsewhere(job_dir: Path) -> Leader | None:
    try:
        return led_elsewhere(job_dir)
    except OSError as error:
        raise UserError(f"the store of {job_dir} cannot be read: {error}") from error


def _why_not_yet(job_dir: Path, is_in_etcd: bool, stack: contextlib.ExitStack) -> str | None:
    """Why this process cannot lead now; None once it has the folder, and nobody leads."""
    with contextlib.ExitStack() as attempt:
        try:
            attempt.enter_context(held(job_dir))
        except FolderHeld as holder:
            if not is_in_etcd and holder.host != socket.gethostname():
                raise UserError(
                    f"--standby: the store of the job in {job_dir} is a file of {holder.host}: "
                    "stand by there, or begin the job with --store etcd://.."
                ) from holder
            return f"{holder.who} leads the job in {job_dir}"
        reason = _led_from_elsewhere(job_dir)
        if reason is None:
            stack.push(attempt.pop_all())
        return reason


def _led_from_elsewhere(job_dir: Path) -> str | None:
    """Why this process cannot lead now, as far as the job's store says."""
    try:
        leader = led_elsewhere(job_dir)
    except OSError as error:
        return f"the job's store does not answer ({error})"
    if leader is None:
        return None
    return f"coordinator {leader.generation} on another machine leads the job in {job_dir}"
