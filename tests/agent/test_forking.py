"""A script that is run in a fork sees what it would see in a process of its own."""

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_bamboo.agent.forking import preload, run_script
from megatron_bamboo.agent.process import fork

SCRIPT = """
import json, os, signal, sys
import beside

seen = {"name": __name__, "argv": sys.argv, "imports": beside.number, "path": sys.path[0]}
with open(os.environ["SEEN"], "a") as file:
    file.write(json.dumps(seen) + "\\n")
if __name__ == "__main__":
    print("the last word")
    if "--die" in sys.argv:
        os.kill(os.getpid(), signal.SIGKILL)
    if "--status" in sys.argv:
        sys.exit(int(sys.argv[-1]))
"""
BESIDE = """
import os
number = len(open(os.environ["SEEN"]).readlines())
"""


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "beside.py").write_text(BESIDE)
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "seen.jsonl").touch()
    monkeypatch.setenv("SEEN", str(tmp_path / "seen.jsonl"))
    return str(tmp_path / "script.py")


def end_of(main: Callable[[], int], output: Path) -> int:
    """How a fork ends, of which the file keeps what it prints."""

    def redirected() -> int:
        os.dup2(os.open(output, os.O_WRONLY | os.O_CREAT), 1)
        # As where a launcher's output is no terminal.
        sys.stdout = os.fdopen(1, "w", buffering=1 << 16)
        return main()

    return os.waitstatus_to_exitcode(os.waitpid(fork(redirected), 0)[1])


def preloaded(script: str, *options: str) -> Callable[[], int]:
    def main() -> int:
        preload(script)
        return run_script((script, *options))

    return main


def test_what_is_imported_beforehand_is_not_imported_again(script: str, tmp_path: Path) -> None:
    assert end_of(preloaded(script, "--lr", "1"), tmp_path / "output") == 0
    before, after = map(json.loads, (tmp_path / "seen.jsonl").read_text().splitlines())
    assert before["name"] != "__main__"
    assert (after["name"], after["argv"]) == ("__main__", [script, "--lr", "1"])
    assert before["path"] == after["path"] == str(tmp_path)
    assert before["imports"] == after["imports"] == 0


def test_the_scripts_status_is_the_forks(script: str, tmp_path: Path) -> None:
    assert end_of(preloaded(script, "--status", "7"), tmp_path / "output") == 7


def test_what_a_worker_printed_before_it_was_killed_is_there(script: str, tmp_path: Path) -> None:
    assert end_of(preloaded(script, "--die"), tmp_path / "output") == -signal.SIGKILL
    assert (tmp_path / "output").read_text() == "the last word\n"
