"""``bamboo drain NODE``: let a node leave a running job without a loss.

What the node runs and holds moves to others at the end of an iteration; nothing is computed again.
"""

import argparse
import time
from pathlib import Path

from megatron_bamboo.agent.asking import (
    LOOK_SECONDS,
    add_wait_option,
    check_wait,
    running_job,
    store_of,
)
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.leaving import ASKED, DRAINED, NOTICED, STAYS, Notice
from megatron_bamboo.membership.secret_file import add_secret_option
from megatron_bamboo.membership.store_client import StoreClient
from megatron_bamboo.planner.plan import Plan

CAUSE = "bamboo drain"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo drain``."""
    parser.add_argument("node", metavar="NODE", help="the node that is to leave, like node5")
    parser.add_argument(
        "--job-dir",
        type=Path,
        metavar="DIR",
        help="the job's folder (default: the running one in runs/)",
    )
    add_secret_option(parser)
    parser.add_argument(
        "--stay", action="store_true", help="take it back: the node stays, or is a standby again"
    )
    add_wait_option(parser, "it has left")


def run(args: argparse.Namespace) -> int:
    """Ask for it and wait until it is done; 0 when the node has left."""
    check_wait(args.wait)
    job_dir = running_job(args.job_dir, "--job-dir")
    with store_of(job_dir, args.secret_file) as client:
        _check(client, args.node)
        notice = Notice(CAUSE, is_over=args.stay)
        client.delete(f"{STAYS}{args.node}")  # of another time
        for prefix in (ASKED, NOTICED):
            client.set(f"{prefix}{args.node}", notice.to_json().encode())
        if args.stay or args.wait == 0:
            print(f"the job knows that {args.node} {'stays' if args.stay else 'is to leave'}")
            return 0
        print(_await_end(client, args.node, args.wait))
    return 0


def _check(client: StoreClient, node: str) -> None:
    """UserError for a node that cannot leave."""
    for prefix, word in (("lost/", "is lost"), (DRAINED, "has left"), ("finished/", "is done")):
        if client.get(f"{prefix}{node}") is not None:
            raise UserError(f"{node} {word} already")
    if client.get(f"agent/{node}") is None:
        raise UserError(f"this job has no node {node}; it runs on {', '.join(_nodes(client))}")


def _nodes(client: StoreClient) -> tuple[str, ...]:
    """The nodes of the plan in force."""
    epoch = client.get("epoch")
    plan = None if epoch is None else client.get(f"plan/{int(epoch)}")
    return ("no node yet",) if plan is None else Plan.from_json(plan).nodes


def _await_end(client: StoreClient, node: str, seconds: float) -> str:
    """Wait until a node has left; the line that says so."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if client.get(f"{DRAINED}{node}") is not None:
            return f"{node} has left"
        if (cause := client.get(f"lost/{node}")) is not None:
            raise UserError(f"{node} was lost before it could leave: {cause.decode()}")
        if (why := client.get(f"{STAYS}{node}")) is not None:
            raise UserError(f"{node} stays: {why.decode()}")
        time.sleep(LOOK_SECONDS)
    raise UserError(
        f"{node} has not left within {seconds:g} s; it will when it can: see the job's lines"
    )
