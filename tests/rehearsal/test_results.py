"""A campaign's results come back as they were kept, and only to the same campaign."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from megatron_bamboo.errors import UserError
from megatron_bamboo.rehearsal.results import Ending, Results, RunResult, Strike
from megatron_bamboo.rehearsal.table import last_line, table

SETTINGS: dict[str, object] = {"seed": 1}


def result(number: int, *strikes: Strike, ending: Ending = Ending.EQUAL) -> RunResult:
    return RunResult(number, ("node1@iter2:#3",), strikes, ending, (), 2, 1, 1, 9.5)


KILLED = Strike("node1", "iter2:#3", "kill", 0.02)
STOPPED = Strike("node2", "iter4:#3:stop", "stop", 5.25)
UNNOTICED = Strike("node2", "iter4:#3:stop", "stop", None)


def test_results_come_back_by_number(tmp_path: Path) -> None:
    kept = Results(tmp_path / "campaign", SETTINGS)
    for one in (result(2, STOPPED), result(1, KILLED, UNNOTICED, ending=Ending.NO_HOLDER)):
        kept.add(one)
    read = Results(tmp_path / "campaign", SETTINGS).read()
    assert read == [result(1, KILLED, UNNOTICED, ending=Ending.NO_HOLDER), result(2, STOPPED)]


def test_another_campaign_gets_none_of_them(tmp_path: Path) -> None:
    Results(tmp_path, SETTINGS).add(result(1, KILLED))
    with pytest.raises(UserError, match="another command, seed or code"):
        Results(tmp_path, {"seed": 2})


def test_the_table_counts_strikes_by_kind_and_ending() -> None:
    results = [
        result(1, KILLED, STOPPED),
        result(2, UNNOTICED, ending=Ending.NO_HOLDER),
        result(3, STOPPED, ending=Ending.BROKEN),
    ]
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(table(results))
    rows = [line.split() for line in console.export_text().splitlines() if line.strip()]
    assert rows[-2:] == [
        ["kill", "1", "1", "0", "0", "0.02", "to", "0.02"],
        ["stop", "3", "1", "1", "1", "5.25", "to", "5.25"],
    ]


def test_the_last_line_says_when_fewer_struck_than_were_asked_for() -> None:
    line = last_line([result(1, KILLED, STOPPED)], wanted=3)
    assert line.startswith("2 faults struck in 1 runs (1 equal, 0 no holder, 0 broken), with 1 tak")
    assert "3 were asked for" in line
    assert "asked for" not in last_line([result(1, KILLED, STOPPED)], wanted=2)
