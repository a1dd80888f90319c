"""The ``bamboo`` command.

Each subcommand is a module with ``add_arguments(parser)`` and ``run(args) -> int``. It is
imported only when it is asked for, so that ``bamboo run`` and ``bamboo schedule`` start without
torch.
"""

import argparse
import importlib
import signal
import sys
from collections.abc import Sequence

import megatron_bamboo
from megatron_bamboo.errors import UserError

COMMANDS: dict[str, tuple[str, str]] = {
    "run": ("megatron_bamboo.agent.run", "train on nodes started on this machine"),
    "coordinator": ("megatron_bamboo.agent.coordinate", "lead a job whose nodes start elsewhere"),
    "agent": ("megatron_bamboo.agent.join", "be one node of such a job"),
    "drain": ("megatron_bamboo.agent.drain", "let a node leave a running job, losing nothing"),
    "stop": ("megatron_bamboo.agent.stop", "end a running job, at once or after a save"),
    "schedule": ("megatron_bamboo.schedule.command", "show a pipeline schedule or a takeover"),
    "preprocess": ("megatron_bamboo.data.preprocess", "turn JSON lines into .bin and .idx"),
    "plan": ("megatron_bamboo.planner.command", "say what pipelines so many nodes should be"),
    "simulate": ("megatron_bamboo.simulator.command", "play a trace of spot nodes by each policy"),
    "profile": ("megatron_bamboo.agent.profile", "time a model's forwards and backwards"),
    "rehearse": ("megatron_bamboo.rehearsal.command", "lose nodes by lot, and judge each run"),
    "memory": ("megatron_bamboo.agent.memory", "say what a run takes of each worker's memory"),
    "status": ("megatron_bamboo.watching.command", "show a job: who runs what, how far it is"),
    "compare": ("megatron_bamboo.observe.compare", "compare two runs bit for bit"),
}

USER_ERROR_STATUS = 2
INTERRUPTED_STATUS = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; its exit status: 2 for input that the user can mend, 130 if it was
    interrupted."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    chosen = next((word for word in arguments if not word.startswith("-")), None)
    try:
        return _run(arguments, chosen)
    except UserError as error:
        print(f"bamboo {chosen}: {error}", file=sys.stderr)
        return USER_ERROR_STATUS
    except KeyboardInterrupt:
        # Who is impatient and presses it again must not see where it was at.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        print(f"bamboo {chosen}: interrupted", file=sys.stderr)
        return INTERRUPTED_STATUS


def _run(arguments: Sequence[str], chosen: str | None) -> int:
    parser = argparse.ArgumentParser(prog="bamboo", description=megatron_bamboo.__doc__)
    parser.add_argument("--version", action="version", version=megatron_bamboo.__version__)
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = parser
    for name, (module_name, help_text) in COMMANDS.items():
        subparser = subparsers.add_parser(name, help=help_text)
        if name == chosen:
            module = importlib.import_module(module_name)
            module.add_arguments(subparser)
            subparser.set_defaults(run_command=module.run)
            asked = subparser
    args, unknown = parser.parse_known_args(arguments)
    if unknown:
        asked.error(f"unrecognized arguments: {' '.join(unknown)}")
    return int(args.run_command(args))
