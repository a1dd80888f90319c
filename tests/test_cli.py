"""What all commands have in common, whatever they do."""

import json
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_bamboo.cli import main


def _hear_interrupts() -> None:
    """As at a terminal; whoever runs the tests in the background may have them ignored."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


@pytest.mark.parametrize("command", [("drain", "node1", "--job-dir"), ("stop",)])
def test_a_command_that_is_interrupted_says_so_in_one_line(
    tmp_path: Path, command: tuple[str, ...]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = {"host": "127.0.0.1", "port": silent.getsockname()[1]}
        (tmp_path / "coordinator.json").write_text(json.dumps(address))
        (tmp_path / "secret").write_text("5" * 64)
        (tmp_path / "secret").chmod(0o600)
        program = [sys.executable, "-m", "megatron_bamboo", *command, str(tmp_path)]
        with subprocess.Popen(
            program, stderr=subprocess.PIPE, text=True, preexec_fn=_hear_interrupts
        ) as process:
            silent.settimeout(60)
            silent.accept()[0].close()
            process.send_signal(signal.SIGINT)
            _, said = process.communicate(timeout=60)
    assert (process.returncode, said) == (130, f"bamboo {command[0]}: interrupted\n")


def test_a_flag_that_a_command_does_not_know_is_refused_with_what_it_knows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(["rehearse", "--losses", "1", "--nodes", "2", "--job-dir", "here", "--", "script.py"])
    said = capsys.readouterr().err
    assert refused.value.code == 2
    assert said.startswith("usage: bamboo rehearse ") and "--dir " in said
    assert "bamboo rehearse: error: unrecognized arguments: --job-dir" in said
