"""Where a job's secret is: in a file that only its owner can read, or in the environment.

Never on a command line, which everybody on the machine can read. The launcher makes one where there
is none, in the job folder, where agents on a shared file system find it.
"""

import argparse
import os
import secrets
import stat
from collections.abc import Mapping
from pathlib import Path

from megatron_bamboo.errors import UserError
from megatron_bamboo.membership.keys import KEY_BYTES, Secret

SECRET_FILE = "secret"
SECRET_VARIABLE = "BAMBOO_SECRET"
_LONGEST_SECRET = 4096


def add_secret_option(parser: argparse.ArgumentParser) -> None:
    """``--secret-file``, for all commands that speak to a job."""
    parser.add_argument(
        "--secret-file",
        type=Path,
        metavar="FILE",
        help=f"holds the job's secret, of mode 600 (default: {SECRET_VARIABLE} of the environment, "
        f"or the file {SECRET_FILE} in the job folder, which bamboo run and bamboo coordinator "
        "make)",
    )


def find_secret(
    job_dir: Path, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> Secret:
    """The job's secret: of the file that is named, or of the environment, or of the job folder.

    Raises:
        UserError: there is none, or others can read it, or it is too short.
    """
    path = file or job_dir / SECRET_FILE
    if file is None and SECRET_VARIABLE in environment:
        return _checked(environment[SECRET_VARIABLE], SECRET_VARIABLE)
    try:
        return _checked(_read_private(path), str(path))
    except OSError as error:
        raise UserError(
            f"the job's secret cannot be read from {path} ({error.strerror}): give its file, or "
            f"the secret itself in {SECRET_VARIABLE}"
        ) from error


def find_or_make_secret(job_dir: Path, file: Path | None = None) -> Secret:
    """The job's secret, a new one in the job folder where none is given; UserError as above."""
    if file is None and SECRET_VARIABLE not in os.environ:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        try:
            descriptor = os.open(job_dir / SECRET_FILE, flags, 0o600)
        except FileExistsError:
            return find_secret(job_dir)
        with os.fdopen(descriptor, "w") as made:
            made.write(secrets.token_hex(KEY_BYTES) + "\n")
    return find_secret(job_dir, file)


def check_secret(job_dir: Path, file: Path | None = None) -> None:
    """Refuse a secret that is given and cannot be used, before anything is begun: UserError."""
    if file is not None or SECRET_VARIABLE in os.environ or (job_dir / SECRET_FILE).exists():
        find_secret(job_dir, file)


def wrong_secret(
    address: str, file: Path | None = None, environment: Mapping[str, str] = os.environ
) -> str:
    """What to say where the secret that ``find_secret`` finds is not that of a coordinator."""
    where = str(file or SECRET_FILE)
    if file is None and SECRET_VARIABLE in environment:
        where = SECRET_VARIABLE
    return (
        f"the secret in {where} is not that of the job whose coordinator listens at {address}: "
        f"give with --secret-file, or in {SECRET_VARIABLE}, the one that this coordinator has "
        f"(the file {SECRET_FILE} in its job folder, if it was given none)"
    )


def without_secret(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment for programs that have no need of the job's secret."""
    return {name: value for name, value in environment.items() if name != SECRET_VARIABLE}


def _read_private(path: Path) -> str:
    with path.open("rb") as file:
        mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
        if mode & (stat.S_IRWXG | stat.S_IRWXO):
            raise UserError(
                f"{path} holds the job's secret and is open to others (mode {mode:04o}): give it "
                "mode 600, and a new secret if others may have read it"
            )
        return file.read(_LONGEST_SECRET).decode(errors="replace")


def _checked(text: str, where: str) -> Secret:
    try:
        return Secret.of(text.strip())
    except ValueError as error:
        raise UserError(
            f"{where} holds no usable secret ({error}): make one with: openssl rand -hex 32"
        ) from None
