"""Workers that are forked from a launcher which has imported what they need.

Importing torch and Megatron-core takes each worker seconds of processor time, forking milliseconds.
That counts where many nodes start, and start again, on few cores: in rehearsals. The launcher never
computes anything itself, since threads do not survive a fork.
"""

import gc
import io
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

PRELOADED = "preloaded_script"
"""The name by which a script runs that is to import things and no more."""


def preload(script: str) -> None:
    """Import what a script imports. What it does is under ``if __name__ == "__main__"``."""
    # Read when torch is imported, and the same as in a worker of its own.
    os.environ["OMP_NUM_THREADS"] = "1"
    _find_modules_beside(script)
    runpy.run_path(script, run_name=PRELOADED)
    # Forked workers then share these pages.
    gc.collect()
    gc.freeze()


def run_script(command: Sequence[str]) -> int:
    """Run a script and its options as ``python SCRIPT ..`` does, in a fork of a launcher that has
    called ``preload``; the exit status, if it is not raised as SystemExit."""
    script, *_options = sys.argv = list(command)
    _find_modules_beside(script)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # What a worker prints just before it is killed is what one wants to read.
            stream.reconfigure(line_buffering=True)
    runpy.run_path(script, run_name="__main__")
    return 0


def _find_modules_beside(script: str) -> None:
    """As Python does for the script that it is given; the launcher goes on to find its own."""
    folder = str(Path(script).resolve().parent)
    if sys.path[0] != folder:
        sys.path.insert(0, folder)
