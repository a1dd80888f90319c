"""One launcher at a time has the folder of a job, and the next one is told which."""

import fcntl
import os
import socket
import threading
import time
from pathlib import Path

import pytest

from megatron_bamboo.agent.job_folder import LOCK_FILE, FolderHeld, held


def test_a_second_one_is_told_who_has_the_folder(tmp_path: Path) -> None:
    with held(tmp_path / "job"), pytest.raises(FolderHeld) as refused, held(tmp_path / "job"):
        pass
    assert refused.value.who == f"process {os.getpid()} on {socket.gethostname()}"
    assert refused.value.host == socket.gethostname()
    with held(tmp_path / "job"):  # and it is free when the first one leaves
        pass


def test_one_that_has_just_taken_the_folder_is_waited_for_until_it_says_who_it_is(
    tmp_path: Path,
) -> None:
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)

        def say_later() -> None:
            time.sleep(0.1)
            (tmp_path / LOCK_FILE).write_text("process 7 on elsewhere\n")

        threading.Thread(target=say_later).start()
        with pytest.raises(FolderHeld, match=r"\(process 7 on elsewhere\)"), held(tmp_path):
            pass


def test_one_that_never_says_who_it_is_is_not_waited_for_for_long(tmp_path: Path) -> None:
    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FolderHeld, match="which does not say who it is"), held(tmp_path):
            pass
