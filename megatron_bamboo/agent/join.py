"""``bamboo agent``: be one node of a job that ``bamboo coordinator`` leads, wherever that is.

It learns from the coordinator what to run, and runs it. A machine that was lost joins again as
another node (``membership/lives.py``), and one that has left and is not to be taken does so by
itself. The node itself is a process group of its own, as in ``bamboo run``; this process waits for
its end, and passes on what it is told.
"""

import argparse
import os
import re
import secrets
import shlex
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

from megatron_bamboo.agent.admission import Machine, admit
from megatron_bamboo.agent.agent import (
    STAYS_STATUS,
    AgentSettings,
    run_agent,
    spawned_worker,
)
from megatron_bamboo.agent.door import DEADLINE_SECONDS, Door, NotNeeded
from megatron_bamboo.agent.far_folder import FarFolder
from megatron_bamboo.agent.interfaces import check_interface
from megatron_bamboo.agent.invitation import INVITATION_KEY, SPEAKER_KEY, Invitation
from megatron_bamboo.agent.job import KEPT_NAMES
from megatron_bamboo.agent.marks import code_marks
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
from megatron_bamboo.membership.store_place import SCHEME, EtcdPlace


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo agent``."""
    parser.add_argument(
        "--join",
        required=True,
        metavar="FILE|HOST:PORT|URL",
        help=f"{ADDRESS_FILE} in the job's folder, which need not be there yet, or where the "
        "coordinator listens, or, for a machine that does not see that folder, the job's place in "
        "etcd (store.url there)",
    )
    parser.add_argument(
        "--job-dir",
        type=Path,
        metavar="DIR",
        help="with a place in etcd: a folder of this node's own for its log and events (default: "
        "runs/<job>-<node>)",
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
    name = socket.gethostname().partition(".")[0] if args.node is None else args.node
    if not re.fullmatch(r"[A-Za-z0-9_-]{1,60}", name):
        raise UserError(
            f"--node {shlex.quote(name)}: a node's name is of letters, digits, - and _ alone"
        )
    if name in KEPT_NAMES:
        raise UserError(f"--node {name}: files of the job itself have that name: give another")
    if args.interface is not None:
        check_interface("--interface", args.interface)
    # By it Slurm says that time is over soon, to every process where it was told so: it is the
    # coordinator's to act, and nobody here must end of it.
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    machine = Machine(name, code, args.interface)
    with handling(signal.SIGINT, signal.default_int_handler):
        if args.join.startswith(SCHEME):
            return _join_from_afar(args, machine)
        if args.job_dir is not None:
            raise UserError(f"--job-dir {args.job_dir}: only with --join {SCHEME}..; leave it out")
        door = Door(args.join, args.secret_file, args.deadline, say=_say)
        return _enter(door, machine)


def _join_from_afar(args: argparse.Namespace, machine: Machine) -> int:
    """Be a node that does not see the job's folder."""
    place = EtcdPlace.parse(args.join, flag="--join")
    if not place.name:
        raise UserError(f"--join {args.join}: give the job's name too, as in its store.url")
    own = args.job_dir or Path("runs") / f"{place.name.rpartition('/')[2]}-{machine.name}"
    folder = FarFolder(place, own.absolute())
    folder.check_trust()
    address = str(folder.path / ADDRESS_FILE)
    with folder.kept():
        missed = f"coordinator in {place}"
        door = Door(address, args.secret_file, args.deadline, missed, _say)
        return _enter(door, replace(machine, job_dir=folder.path), folder.look)


def _enter(door: Door, machine: Machine, look: Callable[[], None] = lambda: None) -> int:
    """Be a node, and another one where it has left the job and its machine stays.

    Args:
        look: called once its part in the job has ended, before it is said how.
    """
    with handling(signal.SIGTERM, lambda *_: door.leave()):
        try:
            settings, status = _live(door, machine)
            while status == STAYS_STATUS:
                door.open_again()
                # What is started then is what lies on this machine then.
                settings, status = _live(door, replace(machine, code=code_marks()))
        except NotNeeded as reason:
            print(f"bamboo agent: {reason}")
            return Status.FINISHED
        except KeyboardInterrupt:
            print("bamboo agent: interrupted before it has joined", file=sys.stderr)
            return Status.INTERRUPTED
        look()
        return _say_end(settings, status)


def _live(door: Door, machine: Machine) -> tuple[AgentSettings, int]:
    """Be one node from its joining to its end; what it was, and its status."""
    settings, invitation = _join(door, machine)
    door.check_is_needed()
    return settings, _be(settings, invitation, door)


def _join(door: Door, machine: Machine) -> tuple[AgentSettings, Invitation]:
    """All that a node needs to begin."""
    secret = door.find()

    def read_invitation(client: StoreClient) -> bytes:
        # Whose secret is wrong learns it sooner from the shorter question.
        if (told := client.get(INVITATION_KEY)) is not None:
            return told
        client.wait([INVITATION_KEY])
        return client.get(INVITATION_KEY) or b""

    text = door.ask(secret, read_invitation)
    try:
        invitation = admit(text, machine, door.check_is_needed, _say)
    except UserError as reason:
        word = str(reason).encode()
        door.ask(secret, lambda client: client.set(f"{REFUSED}{machine.name}", word))
        raise
    node = door.free_name(secret, machine.name)
    speaker = door.ask(secret, lambda c: c.compare_set(SPEAKER_KEY, None, node.encode()))
    assert speaker is not None
    interface = machine.interface or invitation.shape.interface or door.interface()
    spec = invitation.spec(interface, speaker.decode())
    return AgentSettings.of(spec, secret.node(node, secrets.token_hex(8))), invitation


def _say(text: str) -> None:
    print(f"bamboo agent: {text}", flush=True)


def _be(settings: AgentSettings, invitation: Invitation, door: Door) -> int:
    """Run the node, and wait for its end; its status.

    Args:
        door: has heard, until the node does so itself, whether this machine is to be taken.
    """
    os.chdir(invitation.directory)
    _say(f"joins as {settings.node}; its log is {settings.log}")
    start_worker = spawned_worker(python(invitation.command))
    with adopted_orphans():
        with blocked_interrupts():
            run = partial(run_agent, settings, start_worker)
            node = ForkedNode(fork(run, keeps_sigterm=True))

        def pass_on(*_: object) -> None:
            door.leave()
            os.kill(node.pid, signal.SIGTERM)

        try:
            with handling(signal.SIGTERM, pass_on):
                if door.is_leaving:
                    os.kill(node.pid, signal.SIGTERM)
                status = node.await_end()
        except KeyboardInterrupt:
            status = Status.INTERRUPTED
        finally:
            with blocked_interrupts():
                node.kill()
                node.wait()
    return status


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
