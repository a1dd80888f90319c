"""The pipelines of a plan as a picture: which units each stage has, and what it takes.

One row for pipelines that are alike. All rows have the same units below each other, so that it is
seen who else has what.
"""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from megatron_bamboo.planner.infeasible import counted
from megatron_bamboo.planner.report import Report, ShownPipeline
from megatron_bamboo.planner.report_forms import named

_DPI = 130
_WIDTH_INCHES = 13.0
_ROW_INCHES, _AROUND_INCHES = 0.62, 1.7
_BLOCK_HEIGHT = 0.72
_LEAST_LABELLED = 0.04  # of the width
_COLOUR = "#7CC8F2"
_MOST_WHITE = 0.8  # in the colour of a stage that does next to nothing
_SLOWEST_POINTS = 2.5


def save_picture(report: Report, title: str, path: Path) -> None:
    """Write the picture as a PNG file."""
    groups = list(report.groups())
    height = len(groups) * _ROW_INCHES + _AROUND_INCHES
    figure = Figure(figsize=(_WIDTH_INCHES, height), dpi=_DPI, layout="constrained")
    axes = figure.add_subplot()
    for row, (_, pipeline) in enumerate(groups):
        _draw_pipeline(axes, row, pipeline)
    names = [_name(numbers, pipeline) for numbers, pipeline in groups]
    _set_up(axes, report.best.arrangement.num_units, names, title)
    figure.legend(
        handles=[
            Patch(facecolor=_COLOUR, label="stage, with the ms of a microbatch (lighter: less)"),
            Patch(
                facecolor=_COLOUR,
                edgecolor="black",
                linewidth=_SLOWEST_POINTS,
                label="slowest stage of its pipeline",
            ),
        ],
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=9,
    )
    figure.savefig(path, format="png")


def _name(numbers: range, pipeline: ShownPipeline) -> str:
    shape = pipeline.shape
    what = f"pipeline{'s' if len(numbers) > 1 else ''} {named(numbers)}"
    work = f"{counted(shape.num_stages, 'node')}, {counted(shape.num_microbatches, 'microbatch')}"
    each = "" if len(numbers) == 1 else " each"
    return f"{what}: {work}{each}\n{pipeline.simulated_seconds:.4g} s"


def _draw_pipeline(axes: Axes, row: int, pipeline: ShownPipeline) -> None:
    seconds, num_units = pipeline.stage_seconds, pipeline.shape.num_units
    most = max(seconds)
    slowest = max(range(len(seconds)), key=lambda stage: (seconds[stage], stage))
    for stage, (first, past) in enumerate(pipeline.shape.spans):
        is_slowest = stage == slowest
        block = Rectangle(
            (first, row - _BLOCK_HEIGHT / 2),
            past - first,
            _BLOCK_HEIGHT,
            facecolor=_lighter((1 - seconds[stage] / most) * _MOST_WHITE),
            edgecolor="black",
            linewidth=_SLOWEST_POINTS if is_slowest else 0.5,
            zorder=2 if is_slowest else 1,
            clip_on=False,
        )
        axes.add_patch(block)
        if past - first >= _LEAST_LABELLED * num_units:
            middle = (first + past) / 2
            label = f"{seconds[stage] * 1e3:.3g}"
            axes.text(middle, row, label, ha="center", va="center", fontsize=8, zorder=3)


def _lighter(whiteness: float) -> tuple[float, float, float]:
    red, green, blue = (part + (1 - part) * whiteness for part in to_rgb(_COLOUR))
    return red, green, blue


def _set_up(axes: Axes, num_units: int, names: list[str], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=10)
    axes.set_xlim(0, num_units)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlabel("units: the embedding, the layers, the head")
    axes.set_yticks(range(len(names)), names, fontsize=8)
    axes.tick_params(axis="y", length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
