"""``bamboo run``: train on nodes started on this machine.

Each node is a process group of its own, so that a machine that vanishes can be had with one
``kill -9 -- -PID``, or at an exact action with ``--inject``. The script is run once beforehand to
check its options: bad input ends here, before any worker starts.
"""

import argparse
import contextlib
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_bamboo.agent.agent import forked_node, spawned_worker
from megatron_bamboo.agent.environment import prepare_environment
from megatron_bamboo.agent.job import (
    JOB_FILE,
    MOST_FAILURES,
    Deadlines,
    Injection,
    JobShape,
    JobSpec,
    WriteFault,
    check_reachable,
    check_victims,
    parse_injections,
)
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.process import blocked_interrupts, spawn
from megatron_bamboo.agent.run_job import run_job
from megatron_bamboo.agent.sizes import check_order
from megatron_bamboo.agent.telling import LOSSES_FILE
from megatron_bamboo.cloud.watch import NO_SOURCE, source_of
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.secret_file import add_secret_option, check_secret
from megatron_bamboo.rehearsal.fault import LOSSES
from megatron_bamboo.schedule.redundancy import Redundancy
from megatron_bamboo.watching.endpoint import Endpoint

SHOWN_LOGS = 3
SHOWN_LINES = 15
LONGEST_DEADLINE = 7 * 24 * 3600.0  # a week; no clock or socket takes any number

Say = Callable[[str], None]
Advance = Callable[[int], None]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo run``; what follows the script is the script's."""
    limits = Deadlines()
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="nodes to start")
    parser.add_argument(
        "--workers-per-node",
        type=int,
        default=1,
        metavar="N",
        help="workers a node, which share layers",
    )
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
        "--job-dir",
        type=Path,
        metavar="DIR",
        help="folder for logs, events, losses and state (default: runs/<time>)",
    )
    add_secret_option(parser)
    parser.add_argument(
        "--inject",
        action="append",
        default=[],
        metavar="NODE@iterN:ACTION",
        help="kill a node just before an action, like node5@iter7:2.0B3, its 12th of the iteration "
        "(node5@iter7:#12) or a moment of a save (node0@iter10:SAVE_RENAME); node5@change:1COMMIT: "
        "in the first iteration in which state moves to new holders; with another word at "
        f"the end ({', '.join(LOSSES[1:])}) something else happens: node5@iter7:#12:raise; with "
        "flip:UNIT/KIND a bit of its state flips: node5@iter7:1REDUCE:flip:layer1/exp_avg, or of a "
        "replica that it holds: node5@iter7:1VERIFY:flip:replica/exp_avg; or kill "
        "a coordinator just before or after it writes a key of its store: "
        "coordinator@before:plan/1; may be given again",
    )
    seconds = (
        ("--store-deadline", limits.store_seconds, "how long a worker tries to reach the store"),
        ("--record-deadline", limits.record_seconds, "at a loss, before a silent node is fenced"),
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
        help="losses, one after the other, without any iteration between them, after which the "
        f"job ends ({MOST_FAILURES})",
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
    parser.add_argument("script", help="the training script, like pretrain_gpt_bamboo.py")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="the script's own options")


def run(args: argparse.Namespace) -> int:
    """Prepare and run the job; its exit status is in ``agent/outcome.py``."""
    if args.metrics_port is None:
        return _run(args, None)
    with contextlib.closing(Endpoint(args.metrics_port)) as endpoint:
        return _run(args, endpoint)


def _run(args: argparse.Namespace, endpoint: Endpoint | None) -> int:
    names = [f"node{number}" for number in range(args.nodes + max(0, args.standbys))]
    nodes, standbys = tuple(names[: args.nodes]), tuple(names[args.nodes :])
    (injections, faults), deadlines = _checked_injections(args, names), _deadlines(args)
    job_dir = _make_job_dir(args.job_dir)
    check_secret(job_dir, args.secret_file)
    command = [sys.executable, args.script, *args.script_args]
    with _interruptible():
        try:
            status = _prepare(command, len(nodes), args.workers_per_node, job_dir)
            if status != 0:
                return status
            shape = JobShape.read(job_dir)
            spec = JobSpec(
                nodes,
                shape,
                job_dir,
                injections,
                deadlines,
                standbys=standbys,
                write_faults=faults,
                respawn_seconds=args.respawn,
                max_failures=args.max_failures,
                notices=args.notices,
                secret_file=args.secret_file,
            )
            _check_shape(spec, args.workers_per_node)
            with _screen(shape.start_step, shape.train_iters) as (say, advance):
                say(f"job folder: {job_dir}")
                if endpoint is not None:
                    endpoint.serve(job_dir)
                    say(f"metrics: {endpoint.url}")
                outcome = run_job(spec, forked_node(spawned_worker(command)), say, advance)
        except KeyboardInterrupt:
            print("bamboo run: interrupted; nothing is left running", file=sys.stderr)
            return Status.INTERRUPTED
    if outcome.status is Status.FINISHED:
        _print(_last_line(shape, outcome, job_dir))
    else:
        _explain(outcome, job_dir)
    return outcome.status


def _checked_injections(
    args: argparse.Namespace, nodes: Sequence[str]
) -> tuple[tuple[Injection, ...], tuple[WriteFault, ...]]:
    if args.nodes < 1:
        raise UserError(f"--nodes {args.nodes}: start at least one node")
    if args.max_failures < 1:
        raise UserError(f"--max-failures {args.max_failures}: give a number from 1 up")
    if args.standbys < 0:
        raise UserError(f"--standbys {args.standbys}: give a number from 0 up")
    if args.respawn is not None and not 0 < args.respawn <= LONGEST_DEADLINE:
        raise UserError(
            f"--respawn {args.respawn:g}: give more than 0 seconds, and at most "
            f"{LONGEST_DEADLINE:.0f} (a week)"
        )
    source_of(args.notices, nodes[0])
    if args.workers_per_node < 1:
        raise UserError(f"--workers-per-node {args.workers_per_node}: start at least one worker")
    if not Path(args.script).is_file():
        raise UserError(f"there is no script {args.script}")
    injections, faults = parse_injections(args.inject)
    check_victims(injections, nodes, args.respawn is not None)
    return injections, faults


def _deadlines(args: argparse.Namespace) -> Deadlines:
    deadlines = Deadlines(
        record_seconds=args.record_deadline,
        startup_seconds=args.startup_deadline,
        stall_seconds=args.stall_limit,
        store_seconds=args.store_deadline,
    )
    for flag in ("record_deadline", "startup_deadline", "stall_limit", "store_deadline"):
        if not 0 < getattr(args, flag) <= LONGEST_DEADLINE:
            raise UserError(
                f"--{flag.replace('_', '-')} must be more than 0 seconds and at most "
                f"{LONGEST_DEADLINE:.0f} (a week), not {getattr(args, flag):g}"
            )
    return deadlines


def _make_job_dir(wanted: Path | None) -> Path:
    job_dir = (wanted or Path("runs") / time.strftime("%Y-%m-%d-%H%M%S")).absolute()
    try:
        _take_job_dir(job_dir)
    except OSError as error:
        raise UserError(
            f"--job-dir {job_dir} cannot be made or written to ({error.strerror}): give a folder "
            "that can"
        ) from error
    return job_dir


def _take_job_dir(job_dir: Path) -> None:
    if job_dir.exists() and not job_dir.is_dir():
        raise UserError(f"--job-dir {job_dir} is no folder")
    # A job file alone was left by options that were refused.
    traces = (LOSSES_FILE, "events", "logs", "state")
    if any((job_dir / name).exists() for name in traces):
        raise UserError(f"{job_dir} already holds a run: give another --job-dir, or none")
    job_dir.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=job_dir):
        pass


def _prepare(command: Sequence[str], num_nodes: int, workers_per_node: int, job_dir: Path) -> int:
    """Let the script check its options and write the job file; its exit status."""
    (job_dir / JOB_FILE).unlink(missing_ok=True)
    # A session of its own, so that whatever it has started can be ended with it.
    environment = prepare_environment(job_dir, num_nodes, workers_per_node)
    process = spawn(command, environment, new_session=True)
    try:
        status = process.wait()
    except KeyboardInterrupt:
        with blocked_interrupts():
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        raise
    if status not in (0, Status.USER_ERROR):
        print(f"bamboo run: {command[1]} failed while preparing ({status})", file=sys.stderr)
        return Status.FAILED
    return status


def _check_shape(spec: JobSpec, workers_per_node: int) -> None:
    shape, num_nodes = spec.shape, len(spec.nodes)
    if workers_per_node != shape.tensor_size:
        raise UserError(
            f"--workers-per-node {workers_per_node}: the script's layers are shared by "
            f"{shape.tensor_size}; give as many"
        )
    pipelines, needed = shape.arrangement.pipelines, shape.arrangement.num_nodes
    if num_nodes != needed:
        sizes = " and ".join(str(n) for n in dict.fromkeys(p.num_stages for p in pipelines))
        raise UserError(
            f"{len(pipelines)} pipelines of {sizes} stages need {needed} nodes, "
            f"not --nodes {num_nodes}"
        )
    check_order(shape, spec.deadlines)
    if spec.respawn_seconds is not None and shape.redundancy == Redundancy.NONE:
        raise UserError(
            f"--respawn {spec.respawn_seconds:g}: without replicas the first loss ends the job: "
            "leave it out, or --bamboo-redundancy none"
        )
    for injection in spec.injections:
        check_reachable(injection, shape)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Within it SIGINT and SIGTERM raise KeyboardInterrupt, also where a shell ignores SIGINT."""
    before = [
        signal.signal(signal.SIGINT, signal.default_int_handler),
        signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)),
    ]
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])


@contextlib.contextmanager
def _screen(start_step: int, train_iters: int) -> Iterator[tuple[Say, Advance]]:
    """Where lines and progress go: below the lines a bar, if this is a terminal."""
    console = Console()
    if not console.is_terminal:
        yield _print, lambda _: None
        return
    columns = (TextColumn("iterations"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    progress = Progress(
        *columns,
        console=console,
        # Nodes are forked from here: no drawing thread, and their output is not the bar's.
        auto_refresh=False,
        redirect_stdout=False,
        redirect_stderr=False,
    )
    with progress:
        task = progress.add_task("iterations", total=train_iters, completed=start_step)

        def say(line: str) -> None:
            console.print(line, markup=False, highlight=False, soft_wrap=True)

        def advance(step: int) -> None:
            progress.update(task, completed=step, refresh=True)

        yield say, advance


def _print(line: str) -> None:
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # Whoever read along has left, as `head` does. The job and its files go on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _last_line(shape: JobShape, outcome: Outcome, job_dir: Path) -> str:
    lost = f", nodes lost on the way: {len(outcome.lost)}" if outcome.lost else ""
    return f"finished: iteration {shape.train_iters} of {shape.train_iters}{lost}; see {job_dir}"


def _explain(outcome: Outcome, job_dir: Path) -> None:
    """Say why a job did not just finish, with the last words of workers that ended themselves."""
    suspects = [node for node, cause in outcome.lost if "its worker ended" in cause]
    for node in suspects[:SHOWN_LOGS]:
        log = job_dir / "logs" / f"{node}.log"
        lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        print("\n".join([f"--- {log}", *lines]), file=sys.stderr)
    print(f"bamboo run: {outcome.message}", file=sys.stderr)
