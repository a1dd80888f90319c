"""``bamboo memory``: have a training script say what its run will take of each worker's memory."""

import argparse
import os
import subprocess
import sys
from pathlib import Path

from megatron_bamboo.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``bamboo memory``; what follows the script is the script's."""
    parser.add_argument("--nodes", type=int, required=True, metavar="N", help="as of bamboo run")
    parser.add_argument(
        "--workers-per-node", type=int, default=1, metavar="N", help="as of bamboo run"
    )
    parser.add_argument("--json", action="store_true", help="bytes, for programs")
    parser.add_argument("script", help="the training script")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, help="Megatron's flags")


def run(args: argparse.Namespace) -> int:
    """Start the script in its memory phase; its exit status."""
    for name in ("nodes", "workers_per_node"):
        if getattr(args, name) < 1:
            flag = "--" + name.replace("_", "-")
            raise UserError(f"{flag} must be at least 1, not {getattr(args, name)}")
    if not Path(args.script).is_file():
        raise UserError(f"there is no script {args.script}")
    environment = os.environ | {
        "BAMBOO_PHASE": "memory",
        "BAMBOO_NUM_NODES": str(args.nodes),
        "BAMBOO_WORKERS_PER_NODE": str(args.workers_per_node),
        "BAMBOO_MEMORY_FORM": "json" if args.json else "table",
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, args.script, *args.script_args]
    return subprocess.run(command, env=environment, check=False).returncode
