"""The content of a run's page as text, for a terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.reporting.curves import Points

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 60
"""Characters per curve."""
CURVES = ("Accuracy", "Reward", "Completion length, tokens")
"""Titles of the curves that are printed."""


def show_content(content: dict[str, Any], console: Console) -> None:
    """Print the content of `report.json`: status, tiles, findings and some of its curves."""
    reason = f": {content['reason']}" if content["reason"] else ""
    console.print(f"{content['title']}: {content['status']}{reason}")
    for when, part in content["evaluation"].items():
        low, high = part["interval"]
        text = f"{when} {part['accuracy']:.1%} of {part['samples']} held-out problems, {low:.1%} to {high:.1%}"
        console.print(text)
    table = Table("", "now", "since the start", "worst", box=None)
    for tile in content["tiles"]:
        worst = f"{tile['worst_shown']}, step {tile['worst_step']}" if tile["worst_step"] is not None else ""
        table.add_row(tile["name"], tile["shown"], tile["changed"], worst)
    console.print(table)
    for finding in content["findings"]:
        text = f"{finding['title']}\n  {finding['evidence']}\n  {finding['advice']}"
        console.print(text, soft_wrap=True)
    if not content["findings"]:
        console.print(f"No issues found in {content['steps']} logged steps.")
    for curve in content["curves"]:
        if curve["title"] in CURVES:
            for name, points in curve["lines"].items():
                label = curve["title"] if len(curve["lines"]) == 1 else f"{curve['title']}: {name}"
                console.print(f"{line(points)}  {label}", soft_wrap=True)


def show_comparison(comparison: dict[str, Any], console: Console) -> None:
    """Print how runs differ: configurations and accuracies."""
    table = Table("differs", *(run["name"] for run in comparison["runs"]), box=None)
    for key, texts in comparison["settings"].items():
        table.add_row(key, *texts)
    console.print(table)
    for text in comparison["accuracies"]:
        console.print(text, soft_wrap=True)


def line(points: Points) -> str:
    """Return a curve as one line of blocks, from its lowest to its highest value, with both."""
    known = [(step, value) for step, value in points if value is not None]
    steps = [step for step, _ in known]
    width = min(WIDTH, len(known))
    places = [min(width - 1, int(width * (step - steps[0]) / max(1, steps[-1] - steps[0]))) for step in steps]
    columns: list[list[float]] = [[] for _ in range(width)]
    for place, (_, value) in zip(places, known, strict=True):
        columns[place].append(value)
    means = [sum(column) / len(column) if column else None for column in columns]
    low, high = (end(mean for mean in means if mean is not None) for end in (min, max))
    span = (high - low) or 1.0
    drawn = "".join(" " if mean is None else BLOCKS[round(7 * (mean - low) / span)] for mean in means)
    return f"{low:8.4g} {drawn} {high:.4g}"
