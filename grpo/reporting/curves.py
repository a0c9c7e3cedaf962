"""The curves of a run: which metrics belong together, and how each number is computed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from statistics import median
from typing import Any

import numpy

from grpo.reporting.findings.base import tools_of, values
from grpo.rundir.run_dir import Run

Points = Sequence[tuple[Any, ...]]
"""(step, value) pairs; None where a line is broken. Means over runs have their lowest and highest value as well."""
MAX_POINTS = 600
"""Points per line; of more the lowest and the highest of each stretch are kept."""
AXES = ("step", "minutes", "tokens")
"""Axes that a chart may be drawn over."""
PHASES = ("generate", "reward", "logprobs", "update")
"""Phases of a step, as in the names of metrics."""
PROBLEMS = {"solved": "solved", "learnable": "learnable", "out_of_reach": "out of reach"}
"""Names of metrics about the problems seen so far, and of their lines."""


@dataclass(frozen=True)
class Curve:
    """Lines over the steps of a run."""

    title: str
    about: str
    """How the numbers are computed."""
    lines: dict[str, Points]
    """(step, value) pairs by the name of a line."""
    percent: bool = False
    """Whether the values are fractions."""
    held_out: list[tuple[float, float, float, float]] = field(default_factory=list)
    """Held-out accuracies as (step, accuracy, low, high)."""


def curves_of(run: Run) -> list[Curve]:
    """Return the curves of a run, those that matter most first, without those of metrics that were not logged."""
    logged = []
    for title, about, names, percent in METRICS:
        lines = {label: thinned(points) for label, name in names.items() if (points := values(run, name))}
        logged.append(Curve(title, about, lines, percent))
    reward, length, kl, zero_variance, *others = logged
    first = [accuracy(run), reward, length, entropy(run), kl, zero_variance, rewards(run), *by_task(run)]
    return [curve for curve in [*first, *others, *tools(run)] if curve.lines or curve.held_out]


def constants(curves: Sequence[Curve]) -> dict[str, str]:
    """Return the curves whose lines do not change, by title, as text: a line of text says as much as their charts."""
    return {curve.title: text for curve in curves if (text := constant(curve))}


def constant(curve: Curve) -> str:
    """Return a curve whose lines do not change as text, such as `learning rate 0.0003`; empty if one changes."""
    by_line = {name: {value for _, value, *_ in points if value is not None} for name, points in curve.lines.items()}
    if curve.held_out or any(len(of_line) > 1 for of_line in by_line.values()):
        return ""
    name, _, unit = curve.title.partition(", ")
    name = name if name[1:2].isupper() else name[:1].lower() + name[1:]
    form, unit = ("{:.1%}", "") if curve.percent else ("{:.4g}", f" {unit}" * bool(unit))
    shown = {line: form.format(*of_line) + unit for line, of_line in by_line.items() if of_line}
    if len({*shown.values()}) > 1:
        return f"{name} {', '.join(f'{text} ({line})' for line, text in shown.items())}"
    return f"{name} {next(iter(shown.values()), 'unknown')}"


def metrics_of(run: Run) -> dict[str, Points]:
    """Return all metrics of a run by name, as they were logged."""
    points: dict[str, list[tuple[float, float]]] = {}
    for row in run.metrics:
        for name, value in row.items():
            if isinstance(value, int | float) and name != "step":
                points.setdefault(name, []).append((row["step"], value))
    return {name: thinned(points[name]) for name in sorted(points)}


def axes_of(run: Run) -> dict[str, list[float]]:
    """Return steps, and the minutes and tokens until their end where they were logged, for the axes of charts.

    A long run has `MAX_POINTS` of its steps, between which the page interpolates. Tokens are those of prompts and
    completions.
    """
    rows: list[tuple[float, float, float]] = [(0.0, 0.0, 0.0)]
    for row in run.metrics:  # `step_time` is the mean over the steps since the last row
        before, seconds, tokens = rows[-1]
        seconds += (row.get("step_time") or 0.0) * (row["step"] - before)
        rows.append((row["step"], seconds, row.get("num_tokens") or tokens))
    chosen = [*rows[: -1 : -(-len(rows) // MAX_POINTS)], rows[-1]]
    columns = zip(*((step, round(seconds / 60, 4), tokens) for step, seconds, tokens in chosen), strict=True)
    axes = {name: list(column) for name, column in zip(AXES, columns, strict=True)}
    return {name: axis for name, axis in axes.items() if axis[-1]}


def mean_of(lines: Sequence[Points]) -> Points:
    """Return the mean of the same line of several runs, with its lowest and highest value, (step, mean, low, high).

    It ends with the shortest. Where long lines keep other steps, those between are interpolated.
    """
    if len(lines) == 1:
        return lines[0]
    known = [numpy.array([point for point in line if point[1] is not None]) for line in lines]
    last = min(line[-1, 0] for line in known)
    steps = sorted({step for line in known for step in line[:, 0].tolist() if step <= last})
    steps = steps[:: -(-len(steps) // MAX_POINTS)]
    columns = numpy.array([numpy.interp(steps, line[:, 0], line[:, 1]) for line in known])
    rows = zip(columns.mean(0), columns.min(0), columns.max(0), strict=True)
    return [(step, *map(float, row)) for step, row in zip(steps, rows, strict=True)]


def accuracy(run: Run) -> Curve:
    """Return the accuracy as sampled in training and as evaluated."""
    sampled = thinned(values(run, f"rewards/{run.grader}/mean"))
    lines = {"sampled in training": sampled} if sampled else {}
    if guarded := values(run, "guard/accuracy"):
        lines["looks of the guard, greedy"] = thinned(guarded)
    last = run.metrics[-1]["step"] if run.metrics else 0
    known = [(step, run.evaluation[when]) for when, step in (("before", 0), ("after", last)) if when in run.evaluation]
    return Curve(
        "Accuracy",
        f"Line: fraction of the completions sampled in a step that {run.grader} calls correct. Dots: fraction of "
        "greedy answers to held-out problems that are correct, with the 95 % Wilson interval.",
        lines,
        True,
        [(step, part["accuracy"], *part["interval"]) for step, part in known],
    )


def rewards(run: Run) -> Curve:
    """Return the mean of each of several reward functions."""
    names = {str(name): f"rewards/{name}/mean" for name in run.config.reward}
    lines = {label: thinned(points) for label, name in names.items() if (points := values(run, name))}
    about = "Mean value of each reward function over the completions of a step, before its weight."
    return Curve("Reward functions", about, lines if len(names) > 1 else {})


def by_task(run: Run) -> list[Curve]:
    """Return the curves of a mixture, a line per task."""
    curves = []
    for title, about, metric, percent in BY_TASK:
        lines = {name: thinned(values(run, f"{metric}/{name}")) for name in run.tasks}
        curves.append(Curve(title, about, {name: points for name, points in lines.items() if points}, percent))
    return curves


def entropy(run: Run) -> Curve:
    """Return the entropy, of all completions where it is known, else of those in the update."""
    name = max("entropy", "update/entropy", key=lambda name: len(values(run, name)))
    about = "Mean over completion tokens of the entropy of the policy's distribution over the next token."
    points = values(run, name)
    return Curve("Entropy, nats per token", about, {"entropy": thinned(points)} if points else {})


def tools(run: Run) -> list[Curve]:
    """Return the calls of tools."""
    calls = {tool: thinned(values(run, f"tools/{tool}/calls")) for tool in tools_of(run)}
    failed = {tool: thinned(values(run, f"tools/{tool}/errors")) for tool in tools_of(run)}
    return [
        Curve("Tool calls of a step", "Calls of each tool by all completions of a step.", calls),
        Curve("Failed tool calls of a step", "Calls of a step that returned an error to the policy.", failed),
    ]


def thinned(points: Sequence[tuple[float, float]]) -> Points:
    """Return at most `MAX_POINTS` points, with the lowest and the highest of each stretch of steps.

    Between steps of which some are missing is one without a value, where the line is broken.
    """
    spacing = median(after - before for (before, _), (after, _) in pairwise(points)) if len(points) > 1 else 1
    ends = [(before, after) for (before, _), (after, _) in pairwise(points) if after - before > 1.5 * spacing]
    chosen = list(points)
    if len(points) > MAX_POINTS:
        bounds = [len(points) * place // (MAX_POINTS // 2) for place in range(MAX_POINTS // 2 + 1)]
        stretches = [points[start:stop] for start, stop in pairwise(bounds)]
        chosen = [end for part in stretches for end in sorted({min(part, key=value_of), max(part, key=value_of)})]
    gaps = [((before + after) / 2, None) for before, after in ends]
    return sorted([*chosen, *gaps], key=lambda point: point[0])


def value_of(point: tuple[float, float]) -> float:
    """Return the value of a point."""
    return point[1]


BY_TASK: list[tuple[str, str, str, bool]] = [
    (
        "Accuracy by task",
        "Fraction of the completions of each task, sampled in a step, that the task's grader calls correct.",
        "accuracy",
        True,
    ),
    (
        "Reward by task",
        "Mean over all completions of each task in a step of the weighted sum of the rewards that score the task.",
        "reward",
        False,
    ),
    (
        "Zero-variance groups by task",
        "Fraction of the groups of each task whose completions all have the same reward.",
        "rollout/zero_variance",
        True,
    ),
]
"""Title, explanation, metric, and whether it is a fraction, of the curves of a mixture."""
METRICS: list[tuple[str, str, dict[str, str], bool]] = [
    (
        "Reward",
        "Mean over all completions generated in a step of the weighted sum of the reward functions.",
        {"reward": "reward"},
        False,
    ),
    (
        "Completion length, tokens",
        "Tokens per completion of a step: their mean, the shortest and the longest.",
        {key: f"completions/{key}_length" for key in ("mean", "min", "max")},
        False,
    ),
    (
        "KL to the reference, nats per token",
        "Mean over completion tokens of TRL's estimate of the KL divergence between policy and reference.",
        {"KL": "kl"},
        False,
    ),
    (
        "Zero-variance groups",
        "Fraction of groups whose completions all have the same reward: their advantages are zero.",
        {"groups": "rollout/zero_variance"},
        True,
    ),
    (
        "Truncated completions",
        "Fraction of completions that reached train.max_completion_length without an end.",
        {"truncated": "completions/clipped_ratio"},
        True,
    ),
    (
        "Groups of a step",
        "Groups that dynamic sampling has generated for a step, and those that it has kept.",
        {key: f"rollout/groups_{key}" for key in ("generated", "kept")},
        False,
    ),
    (
        "Problems seen",
        "Problems by the accuracy of all of their completions so far.",
        {name: f"rollout/problems_{key}" for key, name in PROBLEMS.items()},
        False,
    ),
    (
        "Completions without an answer after tool calls",
        "Fraction of completions that end with the result of a tool.",
        {"completions": "tools/unanswered"},
        True,
    ),
    ("Gradient norm", "L2 norm of a step's gradient before it is clipped.", {"norm": "grad_norm"}, False),
    ("Learning rate", "Of the optimizer, by its schedule.", {"rate": "learning_rate"}, False),
    (
        "Skipped completions (zero advantage)",
        "Completions of a step that cannot change its gradient, so that the update skips them.",
        {"completions": "update/rows_skipped"},
        False,
    ),
    (
        "Difference of vLLM's log-probabilities, nats",
        "Mean absolute difference between the log-probabilities of sampled tokens by vLLM and by the policy.",
        {"nats": "sampling/sampling_logp_difference/mean"},
        False,
    ),
    (
        "Time by phase, s/step",
        "Seconds of a step by phase, on the first process.",
        {phase: f"time/{phase}" for phase in ("data", *PHASES)},
        False,
    ),
    (
        "GPU utilization",
        "Fraction of the time in which the GPU was busy, by its driver.",
        {"GPU": "gpu/utilization"},
        True,
    ),
    (
        "Memory by phase, GiB",
        "Peak memory that PyTorch has allocated in each phase of a step; host: resident memory of the process.",
        {phase: f"memory/{phase}_gb" for phase in (*PHASES, "host")},
        False,
    ),
]
"""Title with unit, explanation, metrics by the name of their line, and whether they are fractions; the most important
first, in the order of `curves_of`."""
