"""How a command finds a running job and asks it for something."""

import argparse
import contextlib
from collections.abc import Iterator
from pathlib import Path

from megatron_bamboo.agent.preparing import check_seconds
from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.address import ADDRESS_FILE, Signpost
from megatron_bamboo.membership.secret_file import find_secret, wrong_secret
from megatron_bamboo.membership.store_client import StoreClient, StoreOfOthers, StoreTimeout

ANSWER_SECONDS = 10.0
LOOK_SECONDS = 0.2
WAIT_SECONDS = 600.0


def add_wait_option(parser: argparse.ArgumentParser, what: str) -> None:
    """How long the command waits for what it has asked for."""
    parser.add_argument(
        "--wait",
        type=float,
        default=WAIT_SECONDS,
        metavar="SECONDS",
        help=f"how long to wait until {what}; 0: not at all ({WAIT_SECONDS:g})",
    )


def check_wait(seconds: float) -> None:
    """UserError for what is no time to wait; 0 is none."""
    if seconds != 0:
        check_seconds("--wait", seconds)


def running_job(wanted: Path | None, option: str) -> Path:
    """The folder of a job that runs; UserError if it is not clear which.

    Args:
        option: by which the command is told the folder.
    """
    if wanted is not None:
        if not (wanted / ADDRESS_FILE).is_file():
            raise UserError(f"{option} {wanted}: no job runs there; give the folder of one")
        return wanted
    found = sorted(path.parent for path in Path("runs").glob(f"*/{ADDRESS_FILE}"))
    if len(found) != 1:
        names = ", ".join(map(str, found)) or "none"
        raise UserError(f"say with {option} which job; running in runs/: {names}")
    return found[0]


@contextlib.contextmanager
def store_of(job_dir: Path, secret_file: Path | None) -> Iterator[StoreClient]:
    """A running job's store, as its tools use it; UserError where it does not answer, or
    nobody can know where it is."""
    tool = find_secret(job_dir, secret_file).tool()
    place = str((job_dir / ADDRESS_FILE).absolute())
    Signpost(place).check()
    client = StoreClient(place, ANSWER_SECONDS, tool)
    try:
        yield client
    except StoreOfOthers as error:
        raise UserError(wrong_secret(str(Signpost(place)), secret_file)) from error
    except StoreTimeout as error:
        raise UserError(f"the job in {job_dir} does not answer: is it over? ({error})") from error
    finally:
        client.close()
