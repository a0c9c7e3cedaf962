"""Charts as inline SVG in the colours of the page, for a light and a dark screen and for print."""

import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import mean, median
from typing import Any

import matplotlib
from markupsafe import Markup
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter
from numpy import insert

Points = Sequence[tuple[float, float]]
MAX_POINTS = 300
"""Points per line; more are averaged, with a band from the lowest to the highest."""
MAX_LABEL = 24
"""Characters per label of a value."""
INK, GRID = "#010203", "#020304"
COLOURS = tuple(f"#03040{number}" for number in range(6))
"""Placeholders for the colour variables of the page."""
STYLE = {"svg.fonttype": "none", "font.size": 8, "axes.edgecolor": GRID, "text.color": INK, "path.simplify": True}
STYLE |= dict.fromkeys(("xtick.color", "ytick.color", "axes.labelcolor"), INK)

matplotlib.rcParams["text.parse_math"] = False  # a dollar in a value is a dollar


@dataclass(frozen=True)
class Chart:
    """A chart with its title and legend."""

    title: str
    svg: Markup
    """SVG element."""
    labels: list[str] = field(default_factory=list)
    """Names of the lines, in the order of the page's colours; empty for a single line."""


def curves(title: str, lines: dict[str, Points], percent: bool = False) -> Chart:
    """Draw lines over steps, on a logarithmic scale for positive values that span more than two powers of ten."""
    figure, axes = frame(title, percent)
    for colour, points in zip(COLOURS * len(lines), lines.values(), strict=False):
        draw_line(axes, points, colour)
    heights = [height for points in lines.values() for _, height in points]
    if heights and min(heights) > 0 and max(heights) > 100 * min(heights):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    return Chart(title, svg(figure, title), list(lines) if len(lines) > 1 else [])


def accuracy_curve(title: str, sampled: Points, ends: Sequence[tuple[float, float, float, float]]) -> Chart:
    """Draw the accuracy over steps: as sampled in training, and held out as (step, accuracy, low, high)."""
    figure, axes = frame(title, percent=True)
    draw_line(axes, sampled, COLOURS[0])
    for step, accuracy, low, high in ends:
        draw_interval(axes, step, accuracy, low, high, clip_on=False, zorder=5)
    axes.set_xlabel("step")
    return Chart(title, svg(figure, title), ["sampled in training", "held out, greedy, 95 % interval"])


def bars(title: str, heights: dict[str, float | None], unit: str) -> Chart:
    """Draw a bar per value with its height as a number, and a cross where there is none."""
    figure, axes = frame(title, percent=False)
    for place, height in enumerate(heights.values()):
        axes.bar(place, height or 0, color=COLOURS[0], width=0.6)
        axes.text(place, height or 0, "×" if height is None else f"{height:.3g}", ha="center", va="bottom", color=INK)
    label_places(axes, list(heights))
    axes.set_ylabel(unit)
    axes.margins(y=0.15)
    return Chart(title, svg(figure, title))


def accuracy_by_value(
    title: str, accuracies: Mapping[str, Sequence[tuple[float, float, float]]], before: float | None
) -> Chart:
    """Draw accuracies with their intervals (accuracy, low, high) over values, and a line at the accuracy before."""
    figure, axes = frame(title, percent=True)
    for place, of_value in enumerate(accuracies.values()):
        for accuracy, low, high in of_value:
            draw_interval(axes, place, accuracy, low, high)
    if before is not None:
        axes.axhline(before, color=INK, linestyle="--", linewidth=0.8, alpha=0.6)
        axes.text(len(accuracies) - 0.5, before, "before", ha="right", va="bottom", color=INK)
    label_places(axes, list(accuracies))
    return Chart(title, svg(figure, title))


def frame(title: str, percent: bool) -> tuple[Figure, Axes]:
    """Return an empty chart."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(4.4, 2.4), layout="constrained")
        figure.patch.set_alpha(0)
        axes = figure.subplots()
    axes.patch.set_alpha(0)
    axes.grid(color=GRID, linewidth=0.6)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    if percent:
        axes.yaxis.set_major_formatter(PercentFormatter(1))
        axes.set_ylim(0, 1.03)
    return figure, axes


def draw_interval(axes: Axes, place: float, accuracy: float, low: float, high: float, **options: Any) -> None:
    """Draw an accuracy with its interval."""
    ends = [[accuracy - low], [high - accuracy]]
    axes.errorbar(place, accuracy, ends, fmt="o", color=COLOURS[1], capsize=3, **options)


def draw_line(axes: Axes, points: Points, colour: str) -> None:
    """Draw points as a line, broken where steps are missing, with a band from lowest to highest around averages."""
    size = math.ceil(len(points) / MAX_POINTS) if points else 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    steps = [mean(float(step) for step, _ in part) for part in parts]
    heights = [[height for _, height in part] for part in parts]
    if size > 1:
        axes.fill_between(steps, [min(h) for h in heights], [max(h) for h in heights], color=colour, alpha=0.2, lw=0)
    spacing = median(after - before for before, after in pairwise(steps)) if len(steps) > 1 else 1
    gaps = [place + 1 for place, (before, after) in enumerate(pairwise(steps)) if after - before > 1.5 * spacing]
    broken = (insert(line, gaps, math.nan) for line in (steps, [float(mean(h)) for h in heights]))
    axes.plot(*broken, color=colour, linewidth=1.2, marker="." if gaps else "", markersize=3)


def label_places(axes: Axes, labels: Sequence[str]) -> None:
    """Label the integers of the x axis, at a slant if the labels are long."""
    labels = [label if len(label) <= MAX_LABEL else f"{label[: MAX_LABEL - 1]}…" for label in labels]
    crowded = sum(map(len, labels)) > 50
    axes.set_xticks(range(len(labels)), labels, rotation=30 if crowded else 0, ha="right" if crowded else "center")
    axes.set_xlim(-0.5, len(labels) - 0.5)


def svg(figure: Figure, title: str) -> Markup:
    """Return a figure as an SVG element in the colours of the page."""
    file = io.StringIO()
    with matplotlib.rc_context({**STYLE, "svg.hashsalt": title}):
        figure.savefig(file, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    text = file.getvalue()
    text = text[text.index("<svg") :].replace(INK, "currentColor").replace(GRID, "var(--line)")
    for number, colour in enumerate(COLOURS):
        text = text.replace(colour, f"var(--colour-{number})")
    return Markup(text)
