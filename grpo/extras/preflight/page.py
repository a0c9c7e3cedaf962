"""The report of a preflight as a self-contained page: the verdict, distributions, and completions to read."""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import altair
import numpy as np

from grpo.extras.preflight.rewards import total
from grpo.extras.preflight.samples import Sampled
from grpo.extras.preflight.text import COLUMNS, against, cells, effect, lines_of
from grpo.reporting.charts import COLOURS, DATA, Chart, accuracy_by_value, bars, spec_of
from grpo.reporting.completions import MAX_SIZE, PLACE, fitting, group
from grpo.reporting.listing import row_of
from grpo.reporting.render import name_of, page, save

BINS = 12
"""Bars of a histogram at most."""


def write_page(
    folder: Path, report: dict[str, Any], problems: Sequence[Sampled], weights: dict[str, float], grader: str
) -> Path:
    """Write the page of a report into a folder.

    Args:
        problems: the samples.
        weights: of the rewards.
        grader: name of the reward that decides which completions are correct.
    """
    shown = [suggestion | {"text": effect(suggestion)} for suggestion in report["suggestions"]]
    against_it, run = against(report), row_of(folder)
    content = page(
        "preflight.html.jinja",
        title=f"GRPO preflight {name_of(folder)}",
        heading={"model": run["model"], "task": run["task"], "date": run["date"]},
        against=against_it,
        report=report | {"suggestions": shown},
        lines=[line for line in lines_of(report) if line not in against_it],
        table={"names": COLUMNS, "rows": [cells(report, row) for row in report["groups"]]},
        charts=charts(report, problems, weights),
        browse=completions(problems, weights, grader),
    )
    return save(folder, content)


def charts(report: dict[str, Any], problems: Sequence[Sampled], weights: Mapping[str, float]) -> list[Chart]:
    """Return the charts of a report."""
    rewards = [
        value
        for problem in problems
        for completion in problem.completions
        if (value := total(completion, weights)) is not None
    ]
    lengths = [completion.tokens for problem in problems for completion in problem.completions]
    drawn = [bars("Total reward, completions", histogram(rewards), "completions")] if rewards else []
    drawn.append(bars("Length in tokens, completions", histogram(lengths), "completions"))
    if accuracy := report["accuracy"]:
        correct = Counter(sum(completion.correct is True for completion in problem.completions) for problem in problems)
        numbers: dict[str, float | None] = {
            str(number): float(correct[number]) for number in range(report["samples"] + 1)
        }
        drawn.append(bars("Correct completions of a problem, problems", numbers, "problems"))
        drawn.append(accuracy_by_value("pass@k", intervals(accuracy["pass@k"]), None))
    sizes = {str(row["num_generations"]): row["fraction"] for row in report["groups"]}
    drawn.append(accuracy_by_value("Groups with non-zero variance over num_generations", intervals(sizes), None))
    return drawn + ([over_rates(report["learning_rate"])] if report["learning_rate"]["steps"] else [])


def over_rates(rates: dict[str, Any]) -> Chart:
    """Draw KL and gain of the first step over the learning rate, all logarithmic, with the configured rate."""
    names = {"kl": "KL, nats per token", "gain": "gain of better completions, nats"}
    rows = [
        {"rate": step["rate"], "value": step[key], "of": name, "line": f"train.learning_rate={step['rate']:.3g}"}
        for step in rates["steps"]
        for key, name in names.items()
        if step[key] and step[key] > 0
    ]
    scale, axis = altair.Scale(type="log"), altair.Axis(format=".0e", tickCount=5)
    colours = altair.Scale(domain=list(names.values()), range=COLOURS)
    lines = altair.Chart(altair.Data(values=rows)).mark_line(point=True, tooltip=DATA)
    lines = lines.encode(
        altair.X("rate:Q", title="train.learning_rate", scale=scale, axis=axis),
        altair.Y("value:Q", title=None, scale=scale, axis=axis),
        color=altair.Color("of:N", legend=None, scale=colours),
    )
    layers = [lines]
    if rates["configured"]:
        rule = altair.Chart(altair.Data(values=[{"rate": rates["configured"]}])).mark_rule(strokeDash=[4, 3])
        layers.append(rule.encode(altair.X("rate:Q"), color=altair.value("currentColor")))
    title = "First step over the learning rate; dashed: the rate of the run"
    return Chart(title, spec_of(altair.layer(*layers)), labels=list(names.values()))


def intervals(estimates: Mapping[str, dict[str, Any]]) -> dict[str, list[tuple[float, float, float]]]:
    """Return estimates as a chart takes them."""
    return {name: [(estimate["value"], *estimate["interval"])] for name, estimate in estimates.items()}


def histogram(numbers: Sequence[float]) -> dict[str, float | None]:
    """Return how often each number occurs, or each of `BINS` ranges of numbers if there are more, by its label."""
    counts = Counter(numbers)
    if len(counts) <= BINS:
        return {f"{number:.4g}": float(counts[number]) for number in sorted(counts)}
    heights, edges = np.histogram(numbers, BINS)
    return {f"{edge:.3g}": float(height) for edge, height in zip(edges, heights, strict=False)}


def completions(problems: Sequence[Sampled], weights: dict[str, float], grader: str) -> dict[str, Any]:
    """Return the completions for the page, as completions of a single step, as many as a page holds."""
    groups: list[dict[str, Any]] = []
    for problem in problems:
        logs = [
            {
                "completion_tokens": completion.tokens,
                "truncated": not completion.ended,
                "completion": completion.text,
                **completion.rewards,
            }
            for completion in problem.completions
        ]
        rows = [
            {PLACE: len(groups) * len(logs) + place, "prompt": problem.prompt, "answer": problem.answer, **row}
            for place, row in enumerate(logs)
        ]
        groups.append(group(rows, weights, grader))
    count = sum(len(problem.completions) for problem in problems)
    return {"steps": [{"step": 0, "rows": count, "groups": fitting(groups, MAX_SIZE)}], "images": [], "grader": grader}
