"""``bamboo profile``: have a training script time its own model on this machine."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from megatron_bamboo.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo profile``; what follows the script is the script's."""
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="costs as JSON")
    parser.add_argument(
        "--repeats", type=int, default=5, metavar="N", help="passes of a chunk, after a first one"
    )
    parser.add_argument("script", help="the training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="Megatron's flags")


def run(args: argparse.Namespace) -> int:
    """Start the script in its profile phase; its exit status."""
    if args.repeats < 1:
        raise UserError(f"--repeats {args.repeats}: measure at least once")
    if not Path(args.script).is_file():
        raise UserError(f"there is no script {args.script}")
    if not args.output.absolute().parent.is_dir():
        raise UserError(f"--output {args.output}: there is no folder for it")
    environment = os.environ | {
        "BAMBOO_PHASE": "profile",
        "BAMBOO_PROFILE_OUTPUT": str(args.output),
        "BAMBOO_PROFILE_REPEATS": str(args.repeats),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, args.script, *args.script_args]
    return subprocess.run(command, env=environment, check=False).returncode
