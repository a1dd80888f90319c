import os
import sys
from pathlib import Path

from needs import missing, require_program
from slurm_cluster import PROGRAMS

# The data of a tiny GPT is made as in the scenarios.
sys.path.append(str(Path(__file__).parent.parent / "scenarios"))


def pytest_runtest_setup() -> None:
    """Each test here needs a Slurm, whose daemons run as root."""
    if os.geteuid() != 0:
        missing("slurm", "its daemons need root")
    for program, package in PROGRAMS.items():
        require_program("slurm", program, package)
