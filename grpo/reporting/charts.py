"""Charts of a page as Vega-Lite specifications, in the colours of the page, for light, dark and print."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair

from grpo.reporting.curves import Curve, Points, constants

COLOURS = [f"var(--colour-{number})" for number in range(6)]
DASHES = [[1, 0], [6, 2], [2, 2], [8, 2, 2, 2], [4, 4], [1, 3]]
"""Patterns of a chart's lines, so that they differ without colours."""
HEIGHT = 170
"""Pixels."""
LABELS = 42
"""Pixels for the labels beside a chart, so that the charts of a column are aligned."""
NUMBERS = "format(datum.value, abs(datum.value) >= 1e4 ? '~s' : datum.value && abs(datum.value) < 1e-3 ? '.0e' : '~r')"
"""Vega's expression for labels of numbers, which fit into `LABELS`."""
MAX_LABEL = 24
"""Characters per label of a value."""
INTERVAL = "95 % interval"
DATA = {"content": "data"}
"""A tooltip of all fields, which the page's script writes."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Chart:
    """A chart with its title and legend."""

    title: str
    spec: Row
    """Vega-Lite; its data are `points` and `held_out`, which the page's script makes of the lines."""
    about: str = ""
    """How the numbers are computed."""
    unit: str = ""
    """Unit of the values; `%` for fractions."""
    lines: dict[str, Points] = field(default_factory=dict)
    """Points by the name of a line, as of a `Curve`; none where the specification has its data."""
    held_out: list[tuple[float, float, float, float]] = field(default_factory=list)
    labels: list[str] = field(default_factory=list)
    """Names of the lines, in the order of the page's colours; empty for a single line."""


def charts_of(curves: Sequence[Curve]) -> list[Chart]:
    """Return the charts of curves, without those that do not change."""
    alike = constants(curves)
    return [curve(drawn) for drawn in curves if drawn.title not in alike]


def curve(drawn: Curve) -> Chart:
    """Draw lines over steps: as they are and smoothed, with the value under the pointer, and a range to zoom to."""
    names = list(drawn.lines)
    labels = [*names, f"held out, greedy, {INTERVAL}"] if drawn.held_out else names
    banded = any(len(point) > 2 for points in drawn.lines.values() for point in points)
    spec = lines_over_steps(tuple(names), drawn.percent, bool(drawn.held_out), banded)
    unit = "%" if drawn.percent else drawn.title.partition(", ")[2]
    legend = labels if len(labels) > 1 else []
    return Chart(drawn.title, spec, drawn.about, unit, drawn.lines, drawn.held_out, legend)


@functools.cache  # a page that is written again and again takes a third of the time
def lines_over_steps(names: tuple[str, ...], percent: bool = False, held_out: bool = False, bands: bool = False) -> Row:
    """Return the specification of a curve, which has no data.

    The page's script sets the parameters `first` and `last`, so that all charts have the same steps, minutes or tokens.

    Args:
        names: of the lines.
        percent: whether the values are fractions.
        held_out: whether there are held-out accuracies.
        bands: whether lines are means with a lowest and a highest value.
    """
    ends = [altair.expr("first"), altair.expr("last")]
    x = altair.X("x:Q", title="step", scale=altair.Scale(domain=ends, nice=False), axis=altair.Axis(tickCount=6))
    domain = {"domain": [0, 1]} if percent else {}
    labels = {"format": "%"} if percent else {"labelExpr": NUMBERS}
    axis = altair.Axis(tickCount=5, minExtent=LABELS, maxExtent=LABELS, labelLimit=LABELS, **labels)

    def height(name: str) -> altair.Y:
        return altair.Y(f"{name}:Q", title=None, scale=altair.Scale(zero=False, **domain), axis=axis)

    parameters = [altair.param(name=name, value=value) for name, value in (("smoothing", 0), ("first", 0), ("last", 1))]
    near = altair.selection_point(name="near", nearest=True, on="pointerover", empty=False, fields=["step", "line"])
    zoom = altair.selection_interval(name="zoom", encodings=["x"])
    colour = altair.Color("line:N", legend=None, scale=altair.Scale(domain=list(names), range=COLOURS))
    coloured = altair.Chart(altair.NamedData("points")).encode(x, color=colour)
    dash = altair.StrokeDash("line:N", legend=None, scale=altair.Scale(domain=list(names), range=DASHES))
    base = coloured.encode(strokeDash=dash)
    as_it_is = base.mark_line(strokeWidth=1.3, opacity=altair.expr("smoothing ? 0.3 : 1")).encode(height("value"))
    smoothed = base.mark_line(strokeWidth=1.8, opacity=altair.expr("smoothing ? 1 : 0")).encode(height("smooth"))
    visible = altair.condition(near, altair.value(1), altair.value(0))
    dots = base.mark_circle(size=40, tooltip=DATA).encode(height("value"), opacity=visible).add_params(near)
    layers = [as_it_is.add_params(zoom), smoothed, dots]
    if bands:
        layers.insert(0, coloured.mark_area(opacity=0.15).encode(height("low"), altair.Y2("high:Q")))
    if held_out:
        evaluated = altair.Chart(altair.NamedData("held_out")).encode(altair.X("x:Q"), color=altair.value(COLOURS[1]))
        layers.append(evaluated.mark_rule(strokeWidth=1.5).encode(altair.Y("low:Q"), altair.Y2("high:Q")))
        layers.append(evaluated.mark_circle(size=50, opacity=1, tooltip=DATA).encode(altair.Y("value:Q")))
    return spec_of(altair.layer(*layers).add_params(*parameters))


def bars(title: str, heights: Mapping[str, float | None], unit: str) -> Chart:
    """Draw a bar per value with its height as a number, and a cross where there is none."""
    rows = [
        {"of": name, "value": height or 0, "shown": f"{height:.3g}" if height is not None else "×"}
        for name, height in zip(labelled(heights), heights.values(), strict=True)
    ]
    base = altair.Chart(altair.Data(values=rows)).encode(
        altair.X("of:N", title=None, sort=None, axis=altair.Axis(labelAngle=slant(heights))),
        altair.Y("value:Q", title=unit),
    )
    drawn = base.mark_bar(tooltip=DATA).encode(color=altair.value(COLOURS[0]))
    numbers = base.mark_text(dy=-6).encode(text="shown:N", color=altair.value("currentColor"))
    return Chart(title, spec_of(altair.layer(drawn, numbers)), unit=unit)


def accuracy_by_value(
    title: str,
    accuracies: Mapping[str, Sequence[tuple[float, float, float]]],
    before: float | None = None,
    labels: Mapping[str, Sequence[str]] | None = None,
) -> Chart:
    """Draw accuracies with their intervals over values, and a line at the accuracy before training.

    Args:
        accuracies: (accuracy, low, high) of a value.
        labels: of these accuracies, which get colours and stand side by side; the same for all by default.
    """
    names = dict(zip(accuracies, labelled(accuracies), strict=True))
    rows = [
        {"of": names[name], "value": value, "low": low, "high": high, "line": label}
        for name, of_value in accuracies.items()
        for (value, low, high), label in zip(of_value, (labels or {}).get(name, [""] * len(of_value)), strict=True)
    ]
    lines = list(dict.fromkeys(str(row["line"]) for row in rows))
    axis = altair.Axis(labelAngle=slant(accuracies))
    x = altair.X("of:N", title=None, sort=None, axis=axis, scale=altair.Scale(domain=list(names.values())))
    y = altair.Y("value:Q", title=None, scale=altair.Scale(domain=[0, 1]), axis=altair.Axis(format="%", tickCount=5))
    colours = altair.Scale(domain=lines, range=COLOURS if len(lines) > 1 else COLOURS[1:2])
    beside = {"xOffset": altair.XOffset("line:N", sort=None)} if len(lines) > 1 else {}
    base = altair.Chart(altair.Data(values=rows)).encode(
        x, color=altair.Color("line:N", legend=None, scale=colours), **beside
    )
    rules = base.mark_rule(strokeWidth=1.5).encode(altair.Y("low:Q", title=None), altair.Y2("high:Q"))
    layers = [rules, base.mark_circle(size=50, opacity=1, tooltip=DATA).encode(y)]
    if before is not None:
        line = altair.Chart(altair.Data(values=[{"before": before}])).encode(altair.Y("before:Q"))
        layers.append(line.mark_rule(strokeDash=[4, 3], opacity=0.6).encode(color=altair.value("currentColor")))
        words = line.mark_text(align="right", dy=-6, x="width", text="before")
        layers.append(words.encode(color=altair.value("currentColor")))
    return Chart(title, spec_of(altair.layer(*layers)), unit="%", labels=lines if len(lines) > 1 else [])


def labelled(values: Mapping[str, Any]) -> list[str]:
    """Return the values as labels: all of them different, and none too long."""
    short = [value if len(value) <= MAX_LABEL else f"{value[: MAX_LABEL - 1]}…" for value in values]
    return [label if short.count(label) == 1 else f"{label} ({place})" for place, label in enumerate(short, 1)]


def slant(values: Mapping[str, Any]) -> int:
    """Return the angle of labels: crowded ones are slanted."""
    return -30 if sum(map(len, labelled(values))) > 50 else 0


def spec_of(chart: altair.LayerChart) -> Row:
    """Return a chart as Vega-Lite, in the colours of the page."""
    styled = (
        chart.properties(width="container", height=HEIGHT)
        .configure(background="transparent", font="system-ui")
        .configure_axis(
            labelColor="currentColor",
            titleColor="currentColor",
            gridColor="var(--line)",
            domainColor="var(--line)",
            tickColor="var(--line)",
        )
        .configure_view(stroke=None)
    )
    return styled.to_dict()
