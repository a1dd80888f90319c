"""A signal that comes while a process is being forked or begins is heard after it."""

import subprocess
import sys
from pathlib import Path

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


# The child has done nothing yet when it is told; what it can hear by then was set before it began.
KEPT = """
import os, signal, sys, time
from megatron_bamboo.agent.process import fork, hear_sigterm, spawn

def child():
    time.sleep(0.2)
    hear_sigterm(lambda: print("told", flush=True))
    return 0

if sys.argv[1:]:
    sys.exit(child())
{start}
os.kill(pid, signal.SIGTERM)
assert os.waitpid(pid, 0)[1] == 0
"""


@pytest.mark.parametrize(
    "start",
    [
        "pid = fork(child, keeps_sigterm=True)",
        "process = spawn([sys.executable, __file__, 'x'], os.environ, keeps_sigterm=True); "
        "pid = process.pid",
    ],
)
def test_a_child_hears_of_a_signal_that_came_before_it_could(tmp_path: Path, start: str) -> None:
    script = tmp_path / "parent.py"
    script.write_text(KEPT.format(start=start))
    command = [sys.executable, str(script)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (0, "told\n"), ended.stderr
