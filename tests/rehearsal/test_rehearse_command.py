"""``bamboo rehearse``: bad options end at once. A campaign is in ``scenarios``."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

import pytest

from megatron_bamboo.cli import main
from megatron_bamboo.rehearsal import command
from megatron_bamboo.rehearsal.command import Campaign, add_arguments
from megatron_bamboo.rehearsal.draw import KINDS
from megatron_bamboo.rehearsal.fault import How
from megatron_bamboo.rehearsal.results import SETTINGS_FILE, Ending, RunResult, Strike

ROOT = Path(__file__).parents[2]
SCRIPT = str(ROOT / "pretrain_gpt_bamboo.py")
OPTIONS = ("--losses", "2", "--nodes", "2")


def campaign(words: Sequence[str]) -> Campaign:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return Campaign(parser.parse_args(words))


@pytest.mark.parametrize(
    ("options", "script", "message"),
    [
        ((*OPTIONS, "--kinds", "kill,flood"), (SCRIPT,), "--kinds flood: the kinds are kill,"),
        ((*OPTIONS, "--kinds", ","), (SCRIPT,), "name at least one kind"),
        ((*OPTIONS, "--kinds", "kill,flip"), (SCRIPT,), "add --bamboo-verify-replicas N to the"),
        (
            (*OPTIONS, "--kinds", "flip"),
            (SCRIPT, "--bamboo-verify-replicas", "2", "--bamboo-verify-replicas=0"),
            "a bit that flips is found only where copies are compared",
        ),
        (("--losses", "0", "--nodes", "2"), (SCRIPT,), "--losses must be 1 or above"),
        ((*OPTIONS, "--per-run", "0"), (SCRIPT,), "--per-run must be 1 or above"),
        ((*OPTIONS, "--jobs", "0"), (SCRIPT,), "--jobs must be 1 or above"),
        ((*OPTIONS, "--deadline", "0"), (SCRIPT,), "--deadline must be above 0"),
        (OPTIONS, (SCRIPT, "--save", "somewhere"), "leave out --save"),
        (OPTIONS, (SCRIPT, "--save=somewhere"), "leave out --save"),
        (OPTIONS, ("nowhere.py",), "there is no script nowhere.py"),
    ],
)
def test_bad_input_is_one_line(
    tmp_path: Path,
    options: tuple[str, ...],
    script: tuple[str, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["rehearse", *options, "--dir", str(tmp_path / "d"), "--", *script]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_without_networks_no_node_is_cut_off(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "why_not", lambda: "nobody may")
    words = [*OPTIONS, "--dir", str(tmp_path / "d"), SCRIPT]
    campaign(words)
    assert capsys.readouterr().out == "without cut: nobody may\n"
    kinds = json.loads((tmp_path / "d" / SETTINGS_FILE).read_text())["kinds"]
    assert set(KINDS) - set(kinds) == {How.CUT}
    assert main(["rehearse", "--kinds", "kill,cut", *words]) == 2
    assert capsys.readouterr().err == "bamboo rehearse: --kinds cut: nobody may\n"


@pytest.mark.parametrize(
    ("struck", "ending", "is_good"),
    [(2, Ending.EQUAL, True), (2, Ending.BROKEN, False), (1, Ending.EQUAL, False)],
)
def test_too_few_faults_prove_as_little_as_a_broken_run(
    tmp_path: Path, struck: int, ending: Ending, is_good: bool
) -> None:
    judged = campaign([*OPTIONS, "--dir", str(tmp_path / "d"), SCRIPT])
    strikes = (Strike("node1", "iter2:#3", "kill", 0.1),) * struck
    judged.results.append(RunResult(1, (), strikes, ending, (), 2, 1, 1, 9.5))
    assert judged.is_good is is_good
