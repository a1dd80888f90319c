"""``bamboo agent``: be one node of a job that ``bamboo coordinator`` leads, wherever that is.

It learns from the coordinator what to run, and runs it. A machine that was lost joins again as
another node (``membership/lives.py``). The node itself is a process group of its own, as in
``bamboo run``; this process waits for its end, and passes on what it is told.
"""

import argparse
import os
import re
import secrets
import signal
import socket
import sys

from megatron_bamboo.agent.admission import admit
from megatron_bamboo.agent.agent import AgentSettings, run_agent, spawned_worker
from megatron_bamboo.agent.door import DEADLINE_SECONDS, Door, NotNeeded
from megatron_bamboo.agent.interfaces import check_interface
from megatron_bamboo.agent.invitation import INVITATION_KEY, SPEAKER_KEY, Invitation
from megatron_bamboo.agent.job import KEPT_NAMES
from megatron_bamboo.agent.marks import Marks, code_marks
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.preparing import check_seconds, python
from megatron_bamboo.agent.process import (
    ForkedNode,
    adopted_orphans,
    blocked_interrupts,
    fork,
    handling,
)
from megatron_bamboo.agent.refusals import REFUSED
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE
from megatron_bamboo.membership.secret_file import add_secret_option
from megatron_bamboo.membership.store_client import StoreClient


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo agent``."""
    parser.add_argument(
        "--join",
        required=True,
        metavar="FILE|HOST:PORT",
        help=f"{ADDRESS_FILE} in the job's folder, which need not be there yet, or where the "
        "coordinator listens",
    )
    parser.add_argument(
        "--node",
        metavar="NAME",
        help="this node's name in the job (default: this machine's, up to the first dot)",
    )
    parser.add_argument(
        "--interface",
        metavar="NAME",
        help="the network interface by which workers speak to each other, like eth0, where this "
        "machine's has another name than the script's --bamboo-interface (default: that one, or "
        "else the one that leads to the coordinator)",
    )
    add_secret_option(parser)
    parser.add_argument(
        "--deadline",
        type=float,
        default=DEADLINE_SECONDS,
        metavar="SECONDS",
        help=f"how long to look for the coordinator ({DEADLINE_SECONDS:g})",
    )


def run(args: argparse.Namespace) -> int:
    """Be a node until its part in the job ends: 0 where it left in good order or the job is over,
    1 where it was lost, 2 for bad input, also of code or data that are not the job's."""
    code = code_marks()
    check_seconds("--deadline", args.deadline)
    name = args.node or socket.gethostname().partition(".")[0]
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name):
        raise UserError(f"--node {name}: a node's name is of letters, digits, - and _ alone")
    if name in KEPT_NAMES:
        raise UserError(f"--node {name}: files of the job itself have that name: give another")
    if args.interface is not None:
        check_interface("--interface", args.interface)
    # By it Slurm says that time is over soon, to every process where it was told so: it is the
    # coordinator's to act, and nobody here must end of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    door = Door(args.join, args.secret_file, args.deadline)
    with handling(signal.SIGINT, signal.default_int_handler):
        return _enter(door, name, args.interface, code)


def _enter(door: Door, name: str, interface: str | None, code: Marks) -> int:
    with handling(signal.SIGTERM, lambda *_: door.leave()):
        try:
            settings, invitation = _join(door, name, interface, code)
            door.check_is_needed()
        except NotNeeded as reason:
            print(f"bamboo agent: {reason}")
            return Status.FINISHED
        except KeyboardInterrupt:
            return Status.INTERRUPTED
        return _be(settings, invitation)


def _join(
    door: Door, name: str, interface: str | None, code: Marks
) -> tuple[AgentSettings, Invitation]:
    """All that a node needs to begin."""
    secret = door.find()

    def read_invitation(client: StoreClient) -> bytes:
        client.wait([INVITATION_KEY])
        return client.get(INVITATION_KEY) or b""

    text = door.ask(secret, read_invitation)
    try:
        invitation = admit(text, code, interface, door.check_is_needed, _say)
    except UserError as reason:
        word = str(reason).encode()
        door.ask(secret, lambda client: client.set(f"{REFUSED}{name}", word))
        raise
    node = door.free_name(secret, name)
    speaker = door.ask(secret, lambda c: c.compare_set(SPEAKER_KEY, None, node.encode()))
    assert speaker is not None
    interface = interface or invitation.shape.interface or door.interface()
    spec = invitation.spec(interface, speaker.decode())
    return AgentSettings.of(spec, secret.node(node, secrets.token_hex(8))), invitation


def _say(text: str) -> None:
    print(f"bamboo agent: {text}", flush=True)


def _be(settings: AgentSettings, invitation: Invitation) -> int:
    """Run the node, and wait for its end."""
    os.chdir(invitation.directory)
    _say(f"joins as {settings.node}; its log is {settings.log}")
    start_worker = spawned_worker(python(invitation.command))
    with adopted_orphans():
        with blocked_interrupts():
            node = ForkedNode(fork(lambda: run_agent(settings, start_worker)))
        try:
            with handling(signal.SIGTERM, lambda *_: os.kill(node.pid, signal.SIGTERM)):
                status = node.await_end()
        except KeyboardInterrupt:
            status = Status.INTERRUPTED
        finally:
            with blocked_interrupts():
                node.kill()
                node.wait()
    return _say_end(settings, status)


def _say_end(settings: AgentSettings, status: int) -> int:
    if status == Status.INTERRUPTED:
        print(f"bamboo agent: interrupted; nothing of {settings.node} is left", file=sys.stderr)
        return status
    outcome = Outcome.read(settings.job_dir)
    if status != 0 and outcome is None:
        print(f"bamboo agent: {settings.node} was lost; see {settings.log}", file=sys.stderr)
        return Status.FAILED
    end = "left the job" if outcome is None else f"the job is over, with status {outcome.status:d}"
    print(f"bamboo agent: {settings.node}: {end}")
    return Status.FINISHED
