"""What comes before a job, wherever its nodes start: its options, checked by us and by its script.

The script is run once beforehand to check its own options: bad input ends here, before any worker
starts.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from megatron_bamboo.agent.environment import prepare_environment
from megatron_bamboo.agent.job import JOB_FILE, MOST_FAILURES, Deadlines, JobShape
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.agent.process import blocked_interrupts, spawn
from megatron_bamboo.agent.sizes import check_order
from megatron_bamboo.agent.write_trouble import lack_of_room
from megatron_bamboo.cloud.watch import NO_SOURCE, source_of
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.secret_file import add_secret_option
from megatron_bamboo.membership.store_place import add_store_option

LONGEST_DEADLINE = 7 * 24 * 3600.0  # a week; no clock or socket takes any number


def add_job_options(parser: argparse.ArgumentParser) -> None:
    """What a launcher is told of a job: nodes, secret and store, deadlines, notices."""
    limits = Deadlines()
    parser.add_argument(
        "--nodes", type=int, required=True, metavar="N", help="nodes that run stages"
    )
    parser.add_argument(
        "--workers-per-node",
        type=int,
        default=1,
        metavar="N",
        help="workers a node, which share layers",
    )
    add_secret_option(parser)
    add_store_option(parser)
    seconds = (
        ("--store-deadline", limits.store_seconds, "how long a worker tries to reach the store"),
        ("--record-deadline", limits.record_seconds, "for a live worker to leave its record"),
        ("--startup-deadline", limits.startup_seconds, "for nodes and workers to get ready"),
        ("--stall-limit", limits.stall_seconds, "without an iteration before the job ends"),
    )
    for flag, default, text in seconds:
        parser.add_argument(
            flag, type=float, default=default, metavar="SECONDS", help=f"{text} ({default:g})"
        )
    parser.add_argument(
        "--max-failures",
        type=int,
        default=MOST_FAILURES,
        metavar="N",
        help="losses that may follow each other without any iteration between them; at one more "
        f"the job ends ({MOST_FAILURES})",
    )
    parser.add_argument(
        "--metrics-port",
        metavar="[HOST:]PORT",
        help="answer Prometheus there; without HOST only on this machine (127.0.0.1), and port 0 "
        "is any free one (default: nowhere)",
    )
    parser.add_argument(
        "--notices",
        default=NO_SOURCE,
        metavar="SOURCE",
        help="who says that a node's machine is to be taken, so that it leaves in time: aws, gcp "
        "or azure (the machine's metadata server), file:PATH (while that file is there; {node} in "
        "it is the node's name), none (the default); SIGTERM to a node always says so",
    )


def add_script(parser: argparse.ArgumentParser) -> None:
    """The script and its own options, which come last."""
    parser.add_argument("script", help="the training script, like pretrain_gpt_bamboo.py")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="the script's own options")


def check_job_options(args: argparse.Namespace) -> None:
    """UserError for an option that no job can have."""
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: start at least one node")
    if args.max_failures < 1:
        raise UserError(f"--max-failures {args.max_failures}: give a number from 1 up")
    if args.workers_per_node < 1:
        raise UserError(f"--workers-per-node {args.workers_per_node}: start at least one worker")
    source_of(args.notices, "node0")
    if not Path(args.script).is_file():
        raise UserError(f"there is no script {args.script}")


def deadlines(args: argparse.Namespace, joining_seconds: float | None = None) -> Deadlines:
    """The deadlines that were given, checked.

    Args:
        joining_seconds: how long nodes may take to come; by default as long as to start.
    """
    for flag in ("record_deadline", "startup_deadline", "stall_limit", "store_deadline"):
        check_seconds(f"--{flag.replace('_', '-')}", getattr(args, flag))
    return Deadlines(
        record_seconds=args.record_deadline,
        startup_seconds=args.startup_deadline,
        joining_seconds=args.startup_deadline if joining_seconds is None else joining_seconds,
        stall_seconds=args.stall_limit,
        store_seconds=args.store_deadline,
    )


def check_seconds(flag: str, seconds: float) -> None:
    """UserError for what is no deadline."""
    if not 0 < seconds <= LONGEST_DEADLINE:
        raise UserError(
            f"{flag} must be more than 0 seconds and at most "
            f"{LONGEST_DEADLINE:.0f} (a week), not {seconds:g}"
        )


def command_of(args: argparse.Namespace) -> tuple[str, ...]:
    """The script and its own options."""
    return (args.script, *args.script_args)


def python(command: Sequence[str]) -> tuple[str, ...]:
    """How this machine runs a script."""
    return (sys.executable, *command)


def prepare(command: Sequence[str], num_nodes: int, workers_per_node: int, job_dir: Path) -> int:
    """Let the script check its options and write the job file; its exit status."""
    (job_dir / JOB_FILE).unlink(missing_ok=True)
    # A session of its own, so that whatever it has started can be ended with it.
    environment = prepare_environment(job_dir, num_nodes, workers_per_node)
    process = spawn(python(command), environment, new_session=True)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        with blocked_interrupts():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise
    if status not in (0, Status.USER_ERROR):
        room = lack_of_room(job_dir)
        print(f"bamboo: {command[0]} failed while preparing ({status}){room}", file=sys.stderr)
        return Status.FAILED
    return status


def check_shape(args: argparse.Namespace, shape: JobShape, limits: Deadlines) -> None:
    """UserError where the script needs other nodes, workers or deadlines than were given."""
    if args.workers_per_node != shape.tensor_size:
        raise UserError(
            f"--workers-per-node {args.workers_per_node}: the script's layers are shared by "
            f"{shape.tensor_size}; give as many"
        )
    pipelines, needed = shape.arrangement.pipelines, shape.arrangement.num_nodes
    if args.nodes != needed:
        sizes = " and ".join(str(n) for n in dict.fromkeys(p.num_stages for p in pipelines))
        raise UserError(
            f"{len(pipelines)} pipelines of {sizes} stages need {needed} nodes, "
            f"not --nodes {args.nodes}"
        )
    check_order(shape, limits)
