"""``bamboo status``: a job on this machine, as a live table, once, or as JSON."""

import argparse
import time
from pathlib import Path

from rich.console import Console
from rich.live import Live

from megatron_bamboo.watching.render import render
from megatron_bamboo.watching.status import JobStatus
from megatron_bamboo.watching.store_view import StoreWatcher
from megatron_bamboo.watching.summary import status_of

LOOK_SECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo status``."""
    parser.add_argument("job_dir", type=Path, metavar="DIR", help="the job's folder")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--once", action="store_true", help="print it once and end")
    form.add_argument("--json", action="store_true", help="print it once, for programs")


def run(args: argparse.Namespace) -> int:
    """Show the job until it has ended, or once where there is no terminal; 0."""
    watcher, console = StoreWatcher(args.job_dir), Console()
    status = status_of(watcher.look())
    if args.json:
        console.print(status.to_json(), markup=False, highlight=False, soft_wrap=True)
    elif args.once or not console.is_terminal:
        console.print(render(status, console.width))
    else:
        _follow(watcher, console, status)
    return 0


def _follow(watcher: StoreWatcher, console: Console, status: JobStatus) -> None:
    with Live(console=console, auto_refresh=False) as live:
        try:
            while True:
                live.update(render(status, console.width), refresh=True)
                if status.is_over:
                    return
                time.sleep(LOOK_SECONDS)
                status = status_of(watcher.look())
        except KeyboardInterrupt:
            # How one leaves off looking: the job goes on.
            return
