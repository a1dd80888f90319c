"""``bamboo coordinator``: lead a job whose nodes start elsewhere, each with ``bamboo agent``.

It is ``bamboo run`` without nodes. Where it is says ``coordinator.json`` in the job folder. Started
again in the folder of a job that has not ended, it goes on with that job: the nodes train
meanwhile, and only decisions wait.
"""

import argparse
import contextlib
import errno
import ipaddress
import socket
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from megatron_bamboo.agent.former_job import check_is_new
from megatron_bamboo.agent.invitation import Invitation, difference_here
from megatron_bamboo.agent.job import JobShape, JobSpec
from megatron_bamboo.agent.job_folder import FolderHeld, goes_on, held
from megatron_bamboo.agent.limits import allow_descriptors, coordinator_descriptors
from megatron_bamboo.agent.marks import Marks, code_marks
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.agent.preparing import (
    add_job_options,
    add_script,
    check_job_options,
    check_seconds,
    check_shape,
    command_of,
    deadlines,
    prepare,
)
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.agent.screen import interruptible, say_end, say_line, screen, told_to_end
from megatron_bamboo.agent.standing_by import (
    LOOK_SECONDS,
    await_turn,
    check_nobody_leads_elsewhere,
)
from megatron_bamboo.agent.write_trouble import written_to
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.secret_file import check_secret
from megatron_bamboo.membership.stores import begin_store, check_store
from megatron_bamboo.observe.events import read_events
from megatron_bamboo.watching.endpoint import Endpoint

INVITATION_FILE = "invitation.json"
JOIN_SECONDS = 3600.0
# The port of a coordinator that has died just now is free soon.
PORT_SECONDS = 5.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo coordinator``; what follows the script is the script's."""
    parser.add_argument(
        "--job-dir",
        type=Path,
        required=True,
        metavar="DIR",
        help="folder for logs, events, losses and state, which all nodes see; that of a job that "
        "has not ended goes on with it",
    )
    add_job_options(parser)
    parser.add_argument(
        "--host",
        default="127.0.0.1",
        metavar="ADDRESS",
        help="name or address of this machine where the nodes reach it (127.0.0.1: only those of "
        "this machine)",
    )
    parser.add_argument(
        "--port", type=int, default=0, metavar="PORT", help="where it listens (any free one)"
    )
    parser.add_argument(
        "--standby",
        action="store_true",
        help="where another coordinator leads this job, wait, and go on in its place when it is "
        "gone; where none does, lead",
    )
    parser.add_argument(
        "--join-deadline",
        type=float,
        default=JOIN_SECONDS,
        metavar="SECONDS",
        help="for as many nodes to join as are wanted, and where all were lost and others can "
        f"begin again, for the first one ({JOIN_SECONDS:g})",
    )
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare and lead the job, or go on leading it; the job's outcome as exit status."""
    code = code_marks()
    check_job_options(args)
    check_seconds("--join-deadline", args.join_deadline)
    job_dir = args.job_dir.absolute()
    with contextlib.ExitStack() as stack:
        must_end = stack.enter_context(told_to_end())
        if args.standby and (status := _stand_by(args, job_dir, stack, must_end)) is not None:
            return status
        host = checked_address(args.host, args.port, PORT_SECONDS if args.standby else 0.0)
        endpoint = None
        if args.metrics_port is not None:
            endpoint = stack.enter_context(contextlib.closing(Endpoint(args.metrics_port)))
        if not args.standby:
            _hold(job_dir, stack)
        stack.enter_context(interruptible())
        try:
            return _lead(args, code, job_dir, host, endpoint, must_end)
        except KeyboardInterrupt:
            say_line(f"bamboo coordinator: interrupted{_end_of(job_dir)}", sys.stderr)
            return Status.INTERRUPTED


def _end_of(job_dir: Path) -> str:
    """What becomes of an interrupted job."""
    if not (job_dir / "events").is_dir():
        return " while it prepared; nothing has begun"
    came = any(event["event"] == "agent_joined" for event in read_events(job_dir / "events"))
    return "; the nodes end by themselves" if came else "; no node had come"


def _hold(job_dir: Path, stack: contextlib.ExitStack) -> None:
    try:
        stack.enter_context(held(job_dir))
    except FolderHeld as error:
        raise UserError(f"{error}, or --standby to go on with this one when that is gone") from None


def _stand_by(
    args: argparse.Namespace,
    job_dir: Path,
    stack: contextlib.ExitStack,
    must_end: Callable[[], bool],
) -> Status | None:
    """Wait for this coordinator's turn; what to end with if it does not come."""
    with interruptible():
        try:
            return await_turn(job_dir, args.store is not None, stack, must_end, _say)
        except KeyboardInterrupt:
            say_line("bamboo coordinator: interrupted; it has not led", sys.stderr)
            return Status.INTERRUPTED


def _say(text: str) -> None:
    say_line(f"bamboo coordinator: {text}")


def checked_address(host: str, port: int, patience_seconds: float = 0.0) -> str:
    """The address of a name, on which this machine can listen; UserError if it cannot.

    Args:
        patience_seconds: how long a busy port is waited for; then any other one does.
    """
    what = f"--host {host}"
    try:
        address = str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])
    except (socket.gaierror, UnicodeError) as error:
        raise UserError(f"{what} does not resolve ({error}): give an address") from error
    except OverflowError as error:
        raise UserError(f"--port {port}: give one from 1 to 65535, or 0 for any") from error
    if ipaddress.ip_address(address).is_unspecified:
        raise UserError(f"{what}: nobody can reach that; give an address of this machine")
    until = time.monotonic() + patience_seconds
    while not _is_free(address, port, f"{what} --port {port}"):
        if not patience_seconds:
            raise UserError(f"--port {port} on {host} is busy: give another, or none")
        if time.monotonic() > until:
            break
        time.sleep(LOOK_SECONDS)
    return address


def _is_free(address: str, port: int, what: str) -> bool:
    """Whether a port is free; UserError where this machine cannot listen there at all."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address, port), family=family).close()
    except (OSError, OverflowError) as error:
        if getattr(error, "errno", None) == errno.EADDRINUSE:
            return False
        raise UserError(f"{what}: cannot listen there ({error})") from error
    return True


def _lead(
    args: argparse.Namespace,
    code: Marks,
    job_dir: Path,
    host: str,
    endpoint: Endpoint | None,
    must_end: Callable[[], bool],
) -> int:
    is_begun = goes_on(job_dir)
    if not is_begun:
        check_is_new(job_dir)
    check_secret(job_dir, args.secret_file)
    if is_begun:
        _check_is_alike(job_dir, code)
        check_store(job_dir, args.store)
        check_nobody_leads_elsewhere(job_dir)
    else:
        with written_to(job_dir):
            begin_store(job_dir, args.store)
        _say(f"prepares the job in {job_dir}: {args.script} checks its options")
        status = prepare(command_of(args), args.nodes, args.workers_per_node, job_dir)
        if status != 0:
            return status
    spec = _spec(args, job_dir, host)
    allow_descriptors(coordinator_descriptors(spec.shape), "the coordinator")
    spec = replace(spec, invitation=_invite(spec, command_of(args), code, is_begun))
    shape = spec.shape
    with screen(shape.start_step, shape.train_iters) as (say, advance):
        say(f"job folder: {job_dir}")
        if endpoint is not None:
            endpoint.serve(job_dir)
            say(f"metrics: {endpoint.url}")
        what = "goes on" if is_begun else f"waits for {args.nodes} nodes"
        say(f"{what}; they join with: bamboo agent --join {job_dir / ADDRESS_FILE}")
        outcome = run_job(spec, None, say, advance, must_end)
    say_end("bamboo coordinator", shape, outcome, job_dir)
    return outcome.status


def _check_is_alike(job_dir: Path, code: Marks) -> None:
    """UserError where this coordinator's code or data are not those that a job was begun with."""
    path = job_dir / INVITATION_FILE
    if path.exists() and (other := difference_here(path.read_text(), code)) is not None:
        raise UserError(
            f"--job-dir {job_dir} holds a job that was begun with other code or data, and has not "
            f"ended: {other}; go on with those, or give another folder"
        )


def _spec(args: argparse.Namespace, job_dir: Path, host: str) -> JobSpec:
    """The job as the script has prepared it; UserError where it is not what was asked for."""
    shape, limits = JobShape.read(job_dir), deadlines(args, args.join_deadline)
    check_shape(args, shape, limits)
    return JobSpec(
        (),
        shape,
        job_dir,
        deadlines=limits,
        host=host,
        port=args.port,
        max_failures=args.max_failures,
        notices=args.notices,
        secret_file=args.secret_file,
    )


def _invite(spec: JobSpec, command: Sequence[str], code: Marks, is_begun: bool) -> str:
    """What the nodes are told; UserError where those of this job were told something else."""
    invitation = Invitation.of(spec, command, code).to_json()
    path = spec.job_dir / INVITATION_FILE
    if not is_begun:
        with written_to(spec.job_dir):
            path.write_text(invitation)
    elif not path.exists() or path.read_text() != invitation:
        raise UserError(
            f"--job-dir {spec.job_dir} holds a job that was begun with other options, and has not "
            "ended: give the same ones to go on with it, or another folder"
        )
    return invitation
