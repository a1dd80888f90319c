"""A simulated trace as a picture: the nodes that there were, and what each policy's time went into.

All rows have the same time below each other, so that it is seen what each policy made of a loss.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from megatron_bamboo.simulator.report import Simulation
from megatron_bamboo.simulator.run import Outcome
from megatron_bamboo.simulator.timeline import Kind
from megatron_bamboo.simulator.trace import HOUR, Trace

_DPI = 130
_WIDTH_INCHES = 13.0
_NODES_INCHES, _ROW_INCHES, _AROUND_INCHES = 1.6, 0.5, 1.8
_ROW_HEIGHT = 0.8
_COLOURS = {
    Kind.TRAINING: "#B7E1A1",
    Kind.LOST: "#D7191C",
    Kind.TAKEOVER: "#FDAE61",
    Kind.RECONFIGURATION: "#7CC8F2",
    Kind.RESTORE: "#5E3C99",
    Kind.SAVING: "#C9C9C9",
    Kind.WAIT: "#3C3C3C",
}


def save_picture(simulation: Simulation, title: str, path: Path) -> None:
    """Write the picture as a PNG file."""
    rows = _ROW_INCHES * len(simulation.outcomes)
    height = _NODES_INCHES + rows + _AROUND_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    above, below = figure.subplots(
        2, 1, sharex=True, gridspec_kw={"height_ratios": [_NODES_INCHES, rows + 0.4]}
    )
    start = simulation.start_hour
    above.set_title(title, loc="left", fontsize=9)
    _draw_nodes(above, simulation.trace, start)
    for row, outcome in enumerate(simulation.outcomes.values()):
        _draw_outcome(below, row, outcome, start)
    names = [
        f"{name.value}: {outcome.iterations:,} iterations"
        for name, outcome in simulation.outcomes.items()
    ]
    below.set_yticks(range(len(names)), names, fontsize=8)
    below.set_ylim(len(names) - 0.5, -0.5)
    below.set_xlim(start, start + simulation.trace.seconds / HOUR)
    below.set_xlabel("hours")
    handles = [Patch(facecolor=colour, label=kind.value) for kind, colour in _COLOURS.items()]
    figure.legend(handles=handles, loc="outside lower center", ncols=7, frameon=False, fontsize=8)
    figure.savefig(path, format="png")


def _draw_nodes(axes: Axes, trace: Trace, start: float) -> None:
    counts = [*trace.counts()]
    counts.append((trace.seconds, counts[-1][1]))
    hours = [start + seconds / HOUR for seconds, _ in counts]
    axes.step(hours, [number for _, number in counts], where="post", color="black", linewidth=1)
    axes.set_ylim(bottom=0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_ylabel("nodes")


def _draw_outcome(axes: Axes, row: int, outcome: Outcome, start: float) -> None:
    for kind, colour in _COLOURS.items():
        spans = [
            (start + piece.start / HOUR, piece.seconds / HOUR)
            for piece in outcome.pieces
            if piece.kind is kind
        ]
        # Short pieces are seen too: each has a line as wide as a point.
        width = 0 if kind is Kind.TRAINING else 0.6
        place = (row - _ROW_HEIGHT / 2, _ROW_HEIGHT)
        axes.broken_barh(spans, place, facecolors=colour, edgecolors=colour, linewidth=width)
