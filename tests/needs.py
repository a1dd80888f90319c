"""What a test needs of the machine, beyond what the project installs.

Where it is not to be had the test is skipped, with the reason. In CI that is a failure, unless
``BAMBOO_ALLOW_SKIPS`` names it, in a list with commas: a suite that skips by itself tests nothing.
"""

import os
import shutil
from typing import NoReturn

import pytest

ALLOW_SKIPS = "BAMBOO_ALLOW_SKIPS"
NEEDS = ("etcd", "slurm", "netns")


def missing(need: str, reason: str) -> NoReturn:
    """End a test that cannot run here.

    Args:
        need: one of ``NEEDS``.
    """
    assert need in NEEDS, need
    allowed = os.environ.get(ALLOW_SKIPS, "").split(",")
    if os.environ.get("CI") and need not in allowed:
        pytest.fail(f"{reason}; in CI this is skipped only with {ALLOW_SKIPS}={need}", False)
    pytest.skip(f"{need}: {reason}")


def require_program(need: str, name: str, package: str) -> str:
    """The path of a program, or the end of the test."""
    path = shutil.which(name)
    if path is None:
        missing(need, f"there is no {name} (Debian, Ubuntu: apt install {package})")
    return path
