"""What a launcher shows its user: lines, a bar of progress, and how the job ended."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Outcome, Status
from megatron_bamboo.agent.process import handling

SHOWN_LOGS = 3
SHOWN_LINES = 15

Say = Callable[[str], None]
Advance = Callable[[int], None]


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Within it SIGINT and SIGTERM raise KeyboardInterrupt, also where a shell ignores SIGINT."""
    with (
        handling(signal.SIGINT, signal.default_int_handler),
        handling(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT)),
    ):
        yield


@contextlib.contextmanager
def told_to_end() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether there was a SIGUSR1: by it Slurm says that a job's time
    will be over soon."""
    told: list[int] = []
    with handling(signal.SIGUSR1, lambda number, _: told.append(number)):
        yield lambda: bool(told)


@contextlib.contextmanager
def screen(start_step: int, train_iters: int) -> Iterator[tuple[Say, Advance]]:
    """Where lines and progress go: below the lines a bar, if this is a terminal."""
    console = Console()
    if not console.is_terminal:
        yield say_line, lambda _: None
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


def say_line(line: str) -> None:
    """Print a line at once."""
    try:
        print(line, flush=True)
    except BrokenPipeError:
        # Whoever read along has left, as `head` does. The job and its files go on.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def say_end(command: str, shape: JobShape, outcome: Outcome, job_dir: Path) -> None:
    """Say how the job ended; where it did not just finish, with the last words of workers that
    ended themselves."""
    if outcome.status is Status.FINISHED:
        say_line(_last_line(shape, outcome, job_dir))
        return
    suspects = [node for node, cause in outcome.lost if "its worker ended" in cause]
    for node in suspects[:SHOWN_LOGS]:
        log = job_dir / "logs" / f"{node}.log"
        lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        print("\n".join([f"--- {log}", *lines]), file=sys.stderr)
    print(f"{command}: {outcome.message}", file=sys.stderr)


def _last_line(shape: JobShape, outcome: Outcome, job_dir: Path) -> str:
    lost = f", nodes lost on the way: {len(outcome.lost)}" if outcome.lost else ""
    return f"finished: iteration {shape.train_iters} of {shape.train_iters}{lost}; see {job_dir}"
