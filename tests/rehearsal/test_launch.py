"""What a campaign has started ends with it, however that ends."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

# Trains for an hour, if it is let.
SCRIPT = "import time\ntime.sleep(3600)\n"


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_no_training_outlives_its_campaign(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    options = ["--losses", "1", "--nodes", "2", "--dir", str(tmp_path / "campaign")]
    command = [sys.executable, "-m", "megatron_bamboo", "rehearse", *options]
    campaign = subprocess.Popen(
        [*command, str(tmp_path / "script.py")],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        # A shell that starts something in the background lets it ignore the signal.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    training = first_child(campaign.pid)
    os.kill(campaign.pid, number)
    campaign.wait(60)
    assert ends(training)


def first_child(pid: int) -> psutil.Process:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        if children := psutil.Process(pid).children():
            return children[0]
        time.sleep(0.05)
    raise AssertionError("no training was started")


def ends(process: psutil.Process) -> bool:
    """Within 20 seconds, or as a zombie that nobody reaps."""
    gone, alive = psutil.wait_procs([process], timeout=20)
    return bool(gone) or alive[0].status() == psutil.STATUS_ZOMBIE
