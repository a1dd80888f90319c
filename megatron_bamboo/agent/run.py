"""``bamboo run``: train on nodes started on this machine.

Each node is a process group of its own, so that a machine that vanishes can be had with one
``kill -9 -- -PID``, or at an exact action with ``--inject``. It is ``bamboo coordinator`` and all
nodes in one process tree.
"""

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from megatron_bamboo.agent.agent import StartWorker, forked_node, forked_worker, spawned_worker
from megatron_bamboo.agent.forking import preload, run_script
from megatron_bamboo.agent.former_job import check_is_new
from megatron_bamboo.agent.interfaces import LOOPBACK, check_interface
from megatron_bamboo.agent.job import (
    Injection,
    JobShape,
    JobSpec,
    WriteFault,
    check_reachable,
    check_victims,
    first_cut,
    parse_injections,
)
from megatron_bamboo.agent.job_folder import held
from megatron_bamboo.agent.limits import (
    allow_descriptors,
    allow_locked_memory,
    coordinator_descriptors,
    worker_descriptors,
)
from megatron_bamboo.agent.marks import code_marks, difference_since
from megatron_bamboo.agent.outcome import Status
from megatron_bamboo.agent.preparing import (
    LONGEST_DEADLINE,
    add_job_options,
    add_script,
    check_job_options,
    check_shape,
    command_of,
    deadlines,
    prepare,
    python,
)
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.agent.screen import (
    interruptible,
    say_end,
    say_line,
    screen,
    told_to_end,
)
from megatron_bamboo.agent.write_trouble import written_to
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.secret_file import check_secret
from megatron_bamboo.membership.stores import begin_store
from megatron_bamboo.rehearsal.fault import LOSSES
from megatron_bamboo.rehearsal.networks import why_not
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.watching.endpoint import Endpoint


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo run``; what follows the script is the script's."""
    add_job_options(parser)
    parser.add_argument(
        "--standbys",
        type=int,
        default=0,
        metavar="N",
        help="more nodes, which wait to take the place of lost ones",
    )
    parser.add_argument(
        "--respawn",
        type=float,
        metavar="SECONDS",
        help="start a lost node again after so long, as a standby: node5 comes back as node5.2",
    )
    parser.add_argument(
        "--fork-workers",
        action="store_true",
        help="import what the script imports once and fork the workers: they start in a fraction "
        'of the processor time (what the script does must be under if __name__ == "__main__")',
    )
    parser.add_argument(
        "--job-dir",
        type=Path,
        metavar="DIR",
        help="folder for logs, events, losses and state (default: runs/<time>)",
    )
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="NODE@iterN:ACTION",
        help="kill a node just before an action, like node5@iter7:2.0B3, its 12th of the iteration "
        "(node5@iter7:#12) or a moment of a save (node0@iter10:SAVE_RENAME); node5@change:1COMMIT: "
        "in the first iteration in which state moves to new holders; with another word at "
        f"the end ({', '.join(LOSSES[1:])}) something else happens: node5@iter7:#12:raise (cut, "
        "as root: its network is cut, and no connection closes); with flip:UNIT/KIND a bit of its "
        "state flips: node5@iter7:1REDUCE:flip:layer1/exp_avg, or of a replica that it holds: "
        "node5@iter7:1VERIFY:flip:replica/exp_avg; or kill "
        "a coordinator just before or after it writes a key of its store: "
        "coordinator@before:plan/1; may be given again",
    )
    add_script(parser)


def run(args: argparse.Namespace) -> int:
    """Prepare and run the job; its exit status is in ``agent/outcome.py``."""
    if args.metrics_port is None:
        return _run(args, None)
    with contextlib.closing(Endpoint(args.metrics_port)) as endpoint:
        return _run(args, endpoint)


def _run(args: argparse.Namespace, endpoint: Endpoint | None) -> int:
    code = code_marks()
    check_job_options(args)
    names = [f"node{number}" for number in range(args.nodes + max(0, args.standbys))]
    injections, faults = _checked_injections(args, names)
    limits = deadlines(args)
    job_dir = (args.job_dir or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")).absolute()
    with held(job_dir), interruptible(), told_to_end() as must_end:
        check_is_new(job_dir, "another --job-dir, or none")
        check_secret(job_dir, args.secret_file)
        with written_to(job_dir):
            begin_store(job_dir, args.store)
        try:
            status = prepare(command_of(args), args.nodes, args.workers_per_node, job_dir)
            if status != 0:
                return status
            shape = JobShape.read(job_dir)
            check_shape(args, shape, limits)
            if shape.interface is not None:
                check_interface("--bamboo-interface", shape.interface)
            allow_descriptors(coordinator_descriptors(shape), "the coordinator")
            allow_descriptors(worker_descriptors(shape), "a worker")
            spec = JobSpec(
                tuple(names[: args.nodes]),
                shape,
                job_dir,
                injections,
                limits,
                interface=shape.interface or LOOPBACK,
                standbys=tuple(names[args.nodes :]),
                write_faults=faults,
                respawn_seconds=args.respawn,
                max_failures=args.max_failures,
                notices=args.notices,
                secret_file=args.secret_file,
            )
            _check_faults(spec)
            start_node = forked_node(_start_worker(command_of(args), args.fork_workers))
            with screen(shape.start_step, shape.train_iters) as (say, advance):
                say(f"job folder: {job_dir}")
                if (warning := allow_locked_memory()) is not None:
                    say(warning)
                if endpoint is not None:
                    endpoint.serve(job_dir)
                    say(f"metrics: {endpoint.url}")
                differs = difference_since(code, Path.cwd(), args.script, shape.inputs)
                outcome = run_job(spec, start_node, say, advance, must_end, differs)
        except KeyboardInterrupt:
            say_line("bamboo run: interrupted; nothing is left running", sys.stderr)
            return Status.INTERRUPTED
    say_end("bamboo run", shape, outcome, job_dir)
    return outcome.status


def _start_worker(command: Sequence[str], forks: bool) -> StartWorker:
    if not forks:
        return spawned_worker(python(command))
    preload(command[0])
    return forked_worker(lambda: run_script(command))


def _checked_injections(
    args: argparse.Namespace, nodes: Sequence[str]
) -> tuple[tuple[Injection, ...], tuple[WriteFault, ...]]:
    if args.standbys < 0:
        raise UserError(f"--standbys {args.standbys}: give a number from 0 up")
    if args.respawn is not None and not 0 < args.respawn <= LONGEST_DEADLINE:
        raise UserError(
            f"--respawn {args.respawn:g}: give more than 0 seconds, and at most "
            f"{LONGEST_DEADLINE:.0f} (a week)"
        )
    injections, faults = parse_injections(args.inject)
    check_victims(injections, nodes, args.respawn is not None)
    if (cut := first_cut(injections)) is not None:
        _check_cut(cut, args.store)
    return injections, faults


def _check_cut(cut: Injection, store: str | None) -> None:
    if store is not None:
        raise UserError(
            f"--inject {cut}: each node then has a network of its own, from which --store {store} "
            "cannot be reached: leave out one of them"
        )
    if (reason := why_not()) is not None:
        raise UserError(f"--inject {cut}: {reason}")


def _check_faults(spec: JobSpec) -> None:
    if spec.respawn_seconds is not None and spec.shape.redundancy == Redundancy.NONE:
        raise UserError(
            f"--respawn {spec.respawn_seconds:g}: without replicas the first loss ends the job: "
            "leave it out, or --bamboo-redundancy none"
        )
    for injection in spec.injections:
        check_reachable(injection, spec.shape)
