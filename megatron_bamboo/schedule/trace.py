"""A chart as a Chrome trace, for https://ui.perfetto.dev or chrome://tracing.

One thread a rank, one slice a bar, one flow a message, one instant a mirror. A trace counts in
microseconds, so one unit of the costs is shown as one second.
"""

from collections.abc import Iterator

from megatron_bamboo.schedule.chart import Arrow, Bar, Chart, Kind, Mark
from megatron_bamboo.schedule.rehearse import Loss

_MICROSECONDS = 1e6
_PIPELINE = {"pid": 0}
# Names of the trace viewer's own palette; Perfetto colours by a slice's name.
_COLOURS = {
    Kind.FORWARD: "rail_response",
    Kind.BACKWARD: "rail_animation",
    Kind.REDUNDANT: "good",
    Kind.WAIT: "grey",
}

Event = dict[str, object]


def as_trace(chart: Chart) -> dict[str, object]:
    """The trace, for ``json.dumps``."""
    events = [*_names(chart), *map(_slice, chart.bars)]
    for number, arrow in enumerate(chart.arrows):
        events += _flow(number, arrow)
    events += map(_mirror, chart.marks)
    if chart.loss is not None:
        events.append(_loss(chart.loss))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def _names(chart: Chart) -> Iterator[Event]:
    yield {**_PIPELINE, "ph": "M", "name": "process_name", "args": {"name": "pipeline"}}
    for rank in range(chart.num_ranks):
        thread = {**_PIPELINE, "tid": rank, "ph": "M"}
        yield {**thread, "name": "thread_name", "args": {"name": f"rank {rank}"}}
        yield {**thread, "name": "thread_sort_index", "args": {"sort_index": rank}}


def _slice(bar: Bar) -> Event:
    kind = f"{bar.kind}, taken over" if bar.taken_over else str(bar.kind)
    return {
        **_PIPELINE,
        "tid": bar.rank,
        "ph": "X",
        "name": _name(bar),
        "cat": kind,
        "cname": _COLOURS[bar.kind],
        "ts": bar.start * _MICROSECONDS,
        "dur": (bar.end - bar.start) * _MICROSECONDS,
        "args": {"kind": kind, "action": str(bar.action)},
    }


def _name(bar: Bar) -> str:
    if bar.kind is not Kind.WAIT:
        return f"{bar.action} (taken over)" if bar.taken_over else str(bar.action)
    return "wait for the end" if bar.action is None else f"wait for {bar.action}"


def _flow(number: int, arrow: Arrow) -> Iterator[Event]:
    """Two events that the viewer joins; each belongs to the slice that is open at its time."""
    for phase, bar in (("s", arrow.sender), ("f", arrow.receiver)):
        yield {
            **_PIPELINE,
            "tid": bar.rank,
            "ph": phase,
            "id": number,
            "name": "message",
            "cat": "message",
            "bp": "e",
            "ts": (bar.start + bar.end) / 2 * _MICROSECONDS,
        }


def _mirror(mark: Mark) -> Event:
    return _instant(mark.rank, mark.time, str(mark.action), "mirror", scope="t")


def _loss(loss: Loss) -> Event:
    return _instant(loss.rank, loss.time, f"rank {loss.rank} is lost", "loss", scope="g")


def _instant(rank: int, time: float, name: str, category: str, scope: str) -> Event:
    """A mark in one thread (scope t) or across all of them (g)."""
    return {
        **_PIPELINE,
        "tid": rank,
        "ph": "i",
        "s": scope,
        "name": name,
        "cat": category,
        "ts": time * _MICROSECONDS,
    }
