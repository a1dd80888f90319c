"""The table of what was tried and what happened."""

from collections import Counter
from collections.abc import Sequence
from statistics import median

from rich.box import SIMPLE_HEAD
from rich.table import Table

from megatron_bamboo.rehearsal.results import Ending, RunResult, Strike

COLUMNS = ("fault", "struck", *map(str, Ending), "noticed after (median to longest), s")


def table(results: Sequence[RunResult]) -> Table:
    """By kind of fault: how often it struck, how those runs ended, and when it was noticed."""
    shown = Table(*COLUMNS, box=SIMPLE_HEAD)
    strikes = [(strike, result.ending) for result in results for strike in result.strikes]
    for how in sorted({strike.how for strike, _ in strikes}):
        endings = Counter(ending for strike, ending in strikes if strike.how == how)
        counts = [str(endings[ending]) for ending in Ending]
        own = [strike for strike, _ in strikes if strike.how == how]
        shown.add_row(how, str(len(own)), *counts, _noticed(own))
    return shown


def last_line(results: Sequence[RunResult], wanted: int) -> str:
    """What it comes to."""
    struck = sum(len(result.strikes) for result in results)
    endings = Counter(result.ending for result in results)
    told = ", ".join(f"{endings[ending]} {ending}" for ending in Ending)
    takeovers = sum(result.takeovers for result in results)
    changes = sum(result.changes for result in results)
    line = (
        f"{struck} faults struck in {len(results)} runs ({told}), with {takeovers} takeovers and "
        f"{changes} planned changes"
    )
    if struck < wanted:
        line += f"; {wanted} were asked for: the training is too short for more"
    return line


def _noticed(strikes: Sequence[Strike]) -> str:
    seconds = [s.noticed_seconds for s in strikes if s.noticed_seconds is not None]
    return f"{median(seconds):.2f} to {max(seconds):.2f}" if seconds else "-"
