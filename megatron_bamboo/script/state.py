"""What Megatron's scripts ask for from anywhere: the options, the tokenizer, timers.

Megatron-LM keeps these in globals of ``megatron.training``; a script that was written for it calls
the same functions. They are set before the script's providers are called, and never by them.
"""

import argparse
import sys
from dataclasses import dataclass

from megatron.core.timers import Timers

from megatron_bamboo.data.tokenizer import GPT2BPETokenizer


@dataclass(slots=True)
class _Script:
    args: argparse.Namespace
    tokenizer: GPT2BPETokenizer
    speaks: bool
    timers: Timers


_script: _Script | None = None


def begin(args: argparse.Namespace, tokenizer: GPT2BPETokenizer, speaks: bool = False) -> None:
    """Set what the functions below give, once a process and run.

    Args:
        speaks: whether this process is the one that prints what concerns all.
    """
    global _script
    _script = _Script(args, tokenizer, speaks, Timers(log_level=0, log_option="minmax"))


def get_args() -> argparse.Namespace:
    """The options of the run, as one namespace (see ``args.py``)."""
    return _current().args


def get_timers() -> Timers:
    """Megatron-core's timers; the product's own times are in the job folder's events."""
    return _current().timers


def get_tokenizer() -> GPT2BPETokenizer:
    """The tokenizer that the options name."""
    return _current().tokenizer


def print_rank_0(message: object) -> None:
    """Print on one worker of all, the first; it goes to that node's log."""
    if _current().speaks:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def _current() -> _Script:
    assert _script is not None, "pretrain() sets the options, before it calls any provider"
    return _script
