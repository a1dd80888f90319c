"""A chart as a picture, one row a rank.

Kinds of work differ in lightness or pattern as well as in colour, so that they can be told apart by
the colour-blind and on paper.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatron_bamboo.schedule.chart import Bar, Chart, Kind, Mark
from megatron_bamboo.schedule.rehearse import Loss

_DPI = 130
_ROW_INCHES = 0.42
_AROUND_INCHES = 1.6  # title, time axis and legend
_SHORTEST_BAR_INCHES = 0.22
_MIN_WIDTH_INCHES, _MAX_WIDTH_INCHES = 10.0, 40.0
_BAR_HEIGHT = 0.8  # of a row
_LABEL_POINTS, _DIGIT_POINTS = 8.0, 5.5
_MOST_WHITE = 0.6  # in the colour of the last chunk
_LOSS_COLOUR = "#B00020"


@dataclass(frozen=True, slots=True)
class _Look:
    """A fill, and a pattern in another colour."""

    face: str
    hatch: str = ""
    ink: str = "black"
    edge_points: float = 0.5

    def patch_options(self, whiteness: float = 0.0) -> dict[str, Any]:
        """What matplotlib calls these things."""
        face = tuple(part + (1 - part) * whiteness for part in to_rgb(self.face))
        return {
            "facecolor": face,
            "hatch": self.hatch,
            "hatchcolor": self.ink,
            "edgecolor": "black" if self.edge_points else "none",
            "linewidth": self.edge_points,
        }


_LOOKS = {
    Kind.FORWARD: _Look("#7CC8F2"),
    Kind.BACKWARD: _Look("#B35C00"),
    Kind.REDUNDANT: _Look("#E3F5EC", hatch="////", ink="#009E73"),
    Kind.WAIT: _Look("#F2F2F2", hatch="..", ink="#C4C4C4", edge_points=0),
}
_MARK: dict[str, Any] = {"marker": "^", "markersize": 5, "color": "black", "zorder": 3}
_LOST = _Look("#4D4D4D", edge_points=0)


def save_picture(chart: Chart, title: str, path: Path) -> None:
    """Write the picture as a PNG file."""
    width = _width_inches(chart)
    height = chart.num_ranks * _ROW_INCHES + _AROUND_INCHES
    figure = Figure(figsize=(width, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    _set_up(axes, chart, title)
    for bar in chart.bars:
        _draw_bar(axes, bar, chart, points_a_unit=72 * width / chart.makespan)
    if chart.loss is not None:
        _draw_loss(axes, chart.loss, chart.makespan)
    legend: dict[str, Artist] = {name: Patch(**options) for name, options in _legend(chart)}
    if chart.marks:
        legend["mirror sent"] = _draw_marks(axes, chart.marks)
    figure.legend(
        list(legend.values()),
        list(legend),
        loc="outside lower center",
        ncols=len(legend),
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, format="png")


def _width_inches(chart: Chart) -> float:
    shortest = min(bar.end - bar.start for bar in chart.bars if bar.kind is not Kind.WAIT)
    wanted = chart.makespan / shortest * _SHORTEST_BAR_INCHES
    return min(max(wanted, _MIN_WIDTH_INCHES), _MAX_WIDTH_INCHES)


def _set_up(axes: Axes, chart: Chart, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, chart.makespan)
    axes.set_ylim(chart.num_ranks - 0.5, -0.5)
    axes.set_xlabel("time")
    axes.set_yticks(range(chart.num_ranks), [f"rank {rank}" for rank in range(chart.num_ranks)])
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)


def _draw_bar(axes: Axes, bar: Bar, chart: Chart, points_a_unit: float) -> None:
    length = bar.end - bar.start
    look = _look_of(bar)
    corner = (bar.start, bar.rank - _BAR_HEIGHT / 2)
    options = look.patch_options(_whiteness(bar, chart.num_chunks))
    axes.add_patch(Rectangle(corner, length, _BAR_HEIGHT, **options))
    if bar.kind is Kind.WAIT or bar.action is None:
        return
    label = str(bar.action.microbatch)
    if len(label) * _DIGIT_POINTS <= length * points_a_unit:
        # On a patch of the fill, so that no pattern runs through it.
        behind = {"facecolor": options["facecolor"], "edgecolor": "none", "pad": 0.8}
        axes.text(
            bar.start + length / 2,
            bar.rank,
            label,
            ha="center",
            va="center",
            fontsize=_LABEL_POINTS,
            color=_text_colour(options["facecolor"]),
            bbox=behind if look.hatch else None,
        )


def _text_colour(face: tuple[float, float, float]) -> str:
    red, green, blue = face
    return "white" if 0.3 * red + 0.6 * green + 0.1 * blue < 0.5 else "black"


def _look_of(bar: Bar) -> _Look:
    look = _LOOKS[bar.kind]
    return replace(look, hatch="\\\\\\", edge_points=2.0) if bar.taken_over else look


def _whiteness(bar: Bar, num_chunks: int) -> float:
    """Later chunks are lighter."""
    if bar.kind is Kind.WAIT or bar.action is None or not bar.action.chunk:
        return 0.0
    return _MOST_WHITE * bar.action.chunk / (num_chunks - 1)


def _draw_marks(axes: Axes, marks: Sequence[Mark]) -> Artist:
    """A triangle under the moment at which a mirror leaves."""
    times, rows = [mark.time for mark in marks], [mark.rank + _BAR_HEIGHT / 2 for mark in marks]
    (drawn,) = axes.plot(times, rows, linestyle="none", **_MARK)
    return drawn


def _draw_loss(axes: Axes, loss: Loss, makespan: float) -> None:
    corner = (loss.time, loss.rank - _BAR_HEIGHT / 2)
    options = _LOST.patch_options()
    axes.add_patch(Rectangle(corner, makespan - loss.time, _BAR_HEIGHT, **options))
    axes.axvline(loss.time, color=_LOSS_COLOUR, linestyle="--", linewidth=2)
    axes.text(
        (loss.time + makespan) / 2, loss.rank, "lost", color="white", ha="center", va="center"
    )


def _legend(chart: Chart) -> Iterator[tuple[str, dict[str, Any]]]:
    kinds = {bar.kind for bar in chart.bars}
    for kind, look in _LOOKS.items():
        if kind in kinds:
            yield str(kind), look.patch_options()
    taken_over = [bar for bar in chart.bars if bar.taken_over]
    if taken_over:
        yield "taken over", replace(_look_of(taken_over[0]), face="white").patch_options()
    if chart.loss is not None:
        yield "lost", _LOST.patch_options()
    if chart.num_chunks > 1:
        yield "(lighter: later chunk)", {"facecolor": "none", "edgecolor": "none"}
