"""A job's status as people read it: lines, a table of pipelines by stages, last events."""

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta, tzinfo

from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from megatron_bamboo.watching.status import JobStatus, Phase, Progress, StageStatus, StandbyStatus

_BESIDE_CELLS = 14
"""Columns that the first column of a table takes."""
_BETWEEN_CELLS = 3
_STYLES = {
    Phase.RUNNING: "green",
    Phase.WAITING: "yellow",
    Phase.LEADERLESS: "yellow",
    Phase.ABANDONED: "red",
}


def render(status: JobStatus, width: int, zone: tzinfo | None = None) -> RenderableType:
    """Everything, for a screen of so many columns.

    Args:
        zone: of the times shown; by default this machine's.
    """
    parts: list[RenderableType] = [_headline(status)]
    parts += [Text(line) for line in _facts(status)]
    parts.append(_protection(status, zone))
    parts += _tables(status, width)
    if status.lines:
        parts += [Text("last events", style="bold"), *map(Text, status.lines)]
    return Group(*parts)


def _headline(status: JobStatus) -> Text:
    word = str(status.phase) if status.ending is None else status.ending
    line = Text(f"job {status.folder}: ", style="bold")
    return line.append(word, style=_STYLES.get(status.phase, "default"))


def _facts(status: JobStatus) -> Iterator[str]:
    yield _pace(status.progress, status.is_over or status.awaited is not None)
    if (training := _training(status.progress)) is not None:
        yield training
    yield _lead(status)
    totals = status.totals
    if totals.restores:
        yield (
            f"all went back to a checkpoint {totals.restores} times; {totals.undone_steps} steps "
            "were undone"
        )
    train = "trained at the end" if status.is_over else "train"
    yield (
        f"{len(status.nodes)} nodes {train}; lost so far {len(totals.losses)}, drained "
        f"{totals.drained}, returned {totals.returned}; takeovers {totals.takeovers}, planned "
        f"changes {totals.changes}"
    )
    if (awaited := status.awaited) is not None:
        come = f": {', '.join(awaited.there)}" if awaited.there else ""
        yield (
            f"waits up to {awaited.seconds:g} s for nodes; {len(awaited.there)} of "
            f"{awaited.wanted} are there{come}"
        )
    elif status.standbys:
        yield f"standbys: {', '.join(map(_standby, status.standbys))}"
    if status.leaving:
        yield f"to leave: {', '.join(f'{node.node} ({node.notice})' for node in status.leaving)}"


def _pace(progress: Progress, stands: bool) -> str:
    line = f"step {progress.step} of {progress.last_step}"
    if progress.step_seconds is not None and progress.median_step_seconds is not None:
        median = progress.median_step_seconds
        line += f", {progress.step_seconds:.2f} s for it (median of the last {median:.2f} s)"
        if not stands:
            left = timedelta(seconds=round(median * (progress.last_step - progress.step)))
            line += f", about {left} left"
    if progress.saved_step is not None:
        line += f"; saved step {progress.saved_step}"
    return line


def _training(progress: Progress) -> str | None:
    if progress.loss is None:
        return None
    parts = [f"samples {progress.samples}", f"loss {progress.loss:.6f}"]
    if progress.learning_rate is not None:
        parts.append(f"learning rate {progress.learning_rate:.3E}")
    if progress.gradient_norm is not None:
        parts.append(f"gradient norm {progress.gradient_norm:.3f}")
    if progress.validation_loss is not None:
        where = f"after step {progress.validation_step}"
        parts.append(f"validation loss {progress.validation_loss:.6f} {where}")
    return ", ".join(parts)


def _lead(status: JobStatus) -> str:
    leader = status.coordinator
    epoch = "" if status.epoch is None else f"epoch {status.epoch}, "
    if leader is None:
        return f"{epoch}no coordinator yet"
    line = f"{epoch}coordinator {leader.generation}"
    if status.is_over:
        return f"{line} was the last"
    if leader.leads:
        where = "" if leader.address is None else f" at {leader.address}"
        return f"{line} (process {leader.pid}){where}"
    return f"{line} has shown no sign of life for {leader.silent_seconds:.0f} s"


def _standby(standby: StandbyStatus) -> str:
    if standby.stage is None:
        return standby.node
    state = "ready" if standby.is_ready else "gets ready"
    return f"{standby.node} ({state} for stage {standby.stage} of pipeline {standby.pipeline})"


def _protection(status: JobStatus, zone: tzinfo | None) -> Text:
    alone = status.unprotected
    if not status.pipelines:
        return Text("it ended before it began" if status.is_over else "no plan yet")
    if unheld := status.unheld:
        where = (f"stage {stage} of pipeline {number}" for number, stage in unheld)
        return Text(f"no live node holds {', '.join(where)}", style="bold red")
    if not alone:
        return Text(f"every stage {'had' if status.is_over else 'has'} two holders", style="green")
    where = (
        f"stage {stage} of pipeline {number} since step {place.since_step} "
        f"({datetime.fromtimestamp(place.since_unix, zone):%H:%M:%S})"
        for number, stage, place in alone
    )
    holds = "held" if status.is_over else "holds"
    return Text(f"one node alone {holds} {', '.join(where)}", style="bold red")


def _tables(status: JobStatus, width: int) -> Iterator[Table]:
    """One table, or several below each other where the stages are too many for the width."""
    cells = [[_cell(place) for place in pipeline] for pipeline in status.pipelines]
    num_stages = max(map(len, cells), default=0)
    widths = [
        max(_width(row[stage]) for row in cells if stage < len(row)) for stage in range(num_stages)
    ]
    for stages in _blocks(widths, width - _BESIDE_CELLS):
        table = Table(box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1))
        table.add_column("pipeline", justify="right")
        for stage in stages:
            table.add_column(f"stage {stage}", no_wrap=True)
        for number, row in enumerate(cells):
            table.add_row(str(number), *(row[stage] for stage in stages if stage < len(row)))
        yield table


def _blocks(widths: Sequence[int], room: int) -> Iterator[range]:
    """Which columns of these widths go beside each other; at least one does."""
    first, used = 0, 0
    for column, width in enumerate(widths):
        if column > first and used + width + _BETWEEN_CELLS > room:
            yield range(first, column)
            first, used = column, 0
        used += width + _BETWEEN_CELLS
    if widths:
        yield range(first, len(widths))


def _cell(place: StageStatus) -> Text:
    cell = Text(place.node)
    if not place.is_held:
        return cell.append("\nno live holder", style="bold red")
    if place.shadow is None:
        cell.append("\nno replica", style="bold red")
    else:
        cell.append(f"\nshadow {place.shadow}")
    cell.append(f"\nsince step {place.since_step}", style="dim")
    for planned in place.planned:
        cell.append(f"\n{planned}", style="yellow")
    return cell


def _width(cell: Text) -> int:
    return max(map(len, cell.plain.split("\n")))
