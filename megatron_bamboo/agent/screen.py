"""What a launcher shows its user: lines, a bar of progress, and how the job ended."""

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

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
    task = progress.add_task("iterations", total=train_iters, completed=start_step)

    def say(line: str) -> None:
        with _unheeded(sys.stdout):
            console.print(line, markup=False, highlight=False, soft_wrap=True)

    def advance(step: int) -> None:
        with _unheeded(sys.stdout):
            progress.update(task, completed=step, refresh=True)

    with _unheeded(sys.stdout):
        progress.start()
    try:
        yield say, advance
    finally:
        with _unheeded(sys.stdout):
            progress.stop()


def say_line(line: str, stream: TextIO | None = None) -> None:
    """Print a line at once; by default to where results go."""
    stream = sys.stdout if stream is None else stream
    with _unheeded(stream):
        print(line, file=stream, flush=True)


@contextlib.contextmanager
def _unheeded(stream: TextIO) -> Iterator[None]:
    """Within it something is shown, whether or not anybody can see it.

    Whoever read along may have left, as `head` does; the terminal may be closed, or the disk full
    to which a shell writes. The job and its files go on.
    """
    try:
        yield
    except OSError:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def say_end(command: str, shape: JobShape, outcome: Outcome, job_dir: Path) -> None:
    """Say how the job ended; where it did not just finish, with the last words of workers that
    ended themselves."""
    if outcome.status is Status.FINISHED:
        say_line(_last_line(shape, outcome, job_dir))
        return
    suspects = [node for node, cause in outcome.lost if "its worker ended" in cause]
    for node in suspects[:SHOWN_LOGS]:
        log = job_dir / "logs" / f"{node}.log"
        if not log.is_file():  # it is where the node was
            continue
        lines = log.read_text(errors="replace").splitlines()[-SHOWN_LINES:]
        say_line("\n".join([f"--- {log}", *lines]), sys.stderr)
    say_line(f"{command}: {outcome.message}", sys.stderr)


def _last_line(shape: JobShape, outcome: Outcome, job_dir: Path) -> str:
    lost = f", nodes lost on the way: {len(outcome.lost)}" if outcome.lost else ""
    return f"finished: iteration {shape.train_iters} of {shape.train_iters}{lost}; see {job_dir}"
