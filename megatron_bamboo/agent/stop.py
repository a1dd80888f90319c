"""``bamboo stop``: end a running job, at once or after a save."""

import argparse
import sys
import time
from pathlib import Path

from megatron_bamboo.agent.asking import (
    LOOK_SECONDS,
    add_wait_option,
    check_wait,
    running_job,
    store_of,
)
from megatron_bamboo.agent.job import JobShape
from megatron_bamboo.agent.outcome import Outcome
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.secret_file import add_secret_option
from megatron_bamboo.membership.stopping import STOP_KEY, StopWish

CAUSE = "bamboo stop"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo stop``."""
    parser.add_argument(
        "job_dir",
        nargs="?",
        type=Path,
        metavar="JOB_DIR",
        help="the job's folder (default: the running one in runs/)",
    )
    add_secret_option(parser)
    parser.add_argument(
        "--save",
        action="store_true",
        help="complete the step under way and save it first, where the script has --save",
    )
    add_wait_option(parser, "it has ended")


def run(args: argparse.Namespace) -> int:
    """Ask for it and wait until it is done; 0 when the job has ended, however."""
    check_wait(args.wait)
    job_dir = running_job(args.job_dir, "JOB_DIR")
    with store_of(job_dir, args.secret_file) as client:
        client.set(STOP_KEY, StopWish(args.save, CAUSE).to_json().encode())
    if args.save and not _saves(job_dir):
        warning = "its script was started without --save: nothing can be saved"
        print(f"bamboo stop: {warning}; the job ends after its step", file=sys.stderr)
    if args.wait == 0:
        print("the job knows that it is to end")
        return 0
    print(_await_outcome(job_dir, args.wait))
    return 0


def _saves(job_dir: Path) -> bool:
    """Whether a job can be saved, as far as is known."""
    try:
        return JobShape.read(job_dir).saves
    except UserError:  # another version's
        return True


def _await_outcome(job_dir: Path, seconds: float) -> str:
    """Wait for the job's end; what is said of it."""
    until = time.monotonic() + seconds
    while (outcome := Outcome.read(job_dir)) is None:
        if time.monotonic() > until:
            raise UserError(
                f"the job in {job_dir} has not ended within {seconds:g} s; it will when it can: "
                "see its lines"
            )
        time.sleep(LOOK_SECONDS)
    return outcome.message or f"the job is over, with status {outcome.status:d}"
