"""A signal that comes while a process is being forked is heard after it."""

import subprocess
import sys

import pytest

# The hook runs where Python runs its own around every fork, which swallow what a signal raises.
SCRIPT = """
import os, signal, sys
from megatron_bamboo.agent.process import fork, spawn

# A shell that starts something in the background lets it ignore the signal.
signal.signal(signal.SIGINT, signal.default_int_handler)
os.register_at_fork(after_in_parent=lambda: os.kill(os.getpid(), signal.SIGINT))
try:
    {start}
    print("lost")
except KeyboardInterrupt:
    print("heard")
"""


@pytest.mark.parametrize(
    "start", ["fork(lambda: 0)", "spawn([sys.executable, '-c', ''], os.environ)"]
)
def test_an_interrupt_inside_of_a_fork_is_heard(start: str) -> None:
    command = [sys.executable, "-c", SCRIPT.format(start=start)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert ended.stdout.split() == ["heard"]
