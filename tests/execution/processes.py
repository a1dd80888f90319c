"""Processes of the training tests, forked from one that has imported everything."""

import importlib
import os
import time
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

from trained_stages import Job

JOB_SECONDS = 100


def run_processes(
    context: ForkServerContext,
    job: Job,
    module: str,
    function: str,
    arguments: Sequence[tuple[Any, ...]],
    seconds: float = JOB_SECONDS,
) -> None:
    """Call a function in processes of their own, one for each tuple of arguments."""
    log = f"{job.folder}/{module}.log"
    processes = [context.Process(target=_run, args=(log, module, function, a)) for a in arguments]
    for process in processes:
        process.start()
    until = time.monotonic() + seconds
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    ended = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    assert set(ended) == {0}, f"{ended}\n{Path(log).read_text()}{worker_logs(job)}"


def _run(log: str, module: str, function: str, arguments: tuple[Any, ...]) -> None:
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    getattr(importlib.import_module(module), function)(*arguments)


def worker_logs(job: Job) -> str:
    """What the product's workers printed, a headline for each."""
    logs = sorted((job.job_dir / "logs").glob("node*.log"))
    return "".join(f"\n--- {log.name}\n{log.read_text()}" for log in logs)
