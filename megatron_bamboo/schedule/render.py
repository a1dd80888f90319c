"""Schedules as text."""

from textwrap import fill

from megatron_bamboo.schedule.actions import COMPUTE_OPS
from megatron_bamboo.schedule.play import Timed
from megatron_bamboo.schedule.schedule import Program, Schedule
from megatron_bamboo.schedule.simulate import Timeline

WIDTH = 100
_ROWS_AROUND_MARK = 6


def program_lines(schedule: Schedule) -> str:
    """Each live rank's program, wrapped."""
    return "\n".join(
        wrapped(f"rank {rank}: {' '.join(map(str, schedule.programs[rank]))}")
        for rank in schedule.live_ranks
    )


def place_lines(schedule: Schedule) -> str:
    """Who runs each stage and who holds its replica."""
    lines = []
    for stage, (rank, shadow) in enumerate(zip(schedule.placement, schedule.replicas, strict=True)):
        replica = "no replica" if shadow is None else f"replica on rank {shadow}"
        lines.append(f"stage {stage}: on rank {rank}, {replica}")
    return "\n".join(lines)


def time_grid(timeline: Timeline) -> str:
    """Computation as rows of time and columns of ranks: ``|`` goes on, ``.`` is idle."""
    rows = [[timed for timed in row if timed.action.op in COMPUTE_OPS] for row in timeline.rows]
    times = sorted({timed.start for row in rows for timed in row})
    ranks = [rank for rank, row in enumerate(timeline.rows) if row]
    table = [["time", *(f"rank {rank}" for rank in ranks)]]
    for time in times:
        table.append([f"{time:g}", *(_cell_at(rows[rank], time) for rank in ranks)])
    return _columns(table)


def marked_grid(programs: tuple[Program, ...], rank: int, place: int) -> str:
    """The programs around one action, as rows of places and columns of ranks, with an arrow."""
    first = max(place - _ROWS_AROUND_MARK, 0)
    table = [["", *(f"   rank {r}" for r in range(len(programs)))]]
    for row in range(first, place + _ROWS_AROUND_MARK + 1):
        cells = [f"   {program[row]}" if row < len(program) else "" for program in programs]
        if row == place:
            cells[rank] = f"-> {cells[rank].strip() or '(end)'}"
        if any(cells):
            table.append([f"{row}", *cells])
    return _columns(table)


def wrapped(line: str) -> str:
    """A line that may be long, with its continuations indented."""
    return fill(
        line,
        width=WIDTH,
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _cell_at(row: list[Timed], time: float) -> str:
    for timed in row:
        if timed.start == time:
            return str(timed.action)
        if timed.start < time < timed.end:
            return "|"
    return "."


def _columns(table: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = (
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    )
    return "\n".join(lines)
