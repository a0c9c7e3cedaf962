"""The page of a sweep: the best job, the accuracy over the swept values, and its jobs; seeds are grouped."""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean

from grpo.reporting.charts import Chart, accuracy_by_value, bars, charts_of
from grpo.reporting.comparison import MOST, comparison_of
from grpo.reporting.content import heading
from grpo.reporting.curves import Curve, axes_of, constants
from grpo.reporting.render import name_of, page
from grpo.rundir.run_dir import Run
from grpo.rundir.sweep_dir import COLUMNS, Sweep, show

T = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""97.5 % quantiles of Student's t distribution, from one degree of freedom on."""
NORMAL = 1.96
Interval = tuple[float, float, float]
"""Accuracy with the ends of its 95 % interval."""


@dataclass(frozen=True)
class Group:
    """The jobs of a sweep that differ in nothing but their seeds."""

    label: str
    """Values of the swept settings, such as `num_generations=4`."""
    runs: list[Run]
    """The best job first."""

    @property
    def accuracies(self) -> list[float]:
        """Accuracies of the jobs that were evaluated."""
        return [run.accuracy for run in self.runs if run.accuracy is not None]

    @property
    def quality(self) -> tuple[float, float]:
        """Mean accuracy, then mean reward: the order of groups."""
        return tuple(mean(numbers) for numbers in zip(*map(quality, self.runs), strict=True))


def sweep_page(sweep: Sweep, live: bool = False) -> str:
    """Return the page of a sweep, which reloads if it is live."""
    settings, seeds = keys_of(sweep)
    groups = groups_of(sweep, settings)
    best = max((run for run in sweep.runs if run.accuracy is not None), key=quality, default=None)
    first = sorted(groups, key=lambda group: group.quality, reverse=True)[:MOST]
    comparison = None
    if len(first) > 1:
        compared = {label_of([*settings, *seeds], sweep, group.runs[0]): group.runs[0] for group in first}
        to = next((label for label, run in compared.items() if run == best), None)
        comparison = comparison_of(compared, to, {group.label: group.runs for group in first})
    curves = [Curve(**fields) for fields in comparison["curves"]] if comparison else []
    over_values = charts_over_values(sweep, groups, settings)
    return page(
        "sweep.html.jinja",
        live=live,
        title=f"GRPO sweep {name_of(sweep.folder)}",
        heading=heading(sweep.runs[0]),
        status=status_of(sweep),
        sweep=sweep,
        columns=COLUMNS | {"completions per step": lambda run: show(run.summary.get("completions_a_step"), "{:,}")},
        best=best,
        runs=sorted(sweep.runs, key=quality, reverse=True),
        groups=[group for group in groups if len(group.runs) > 1],
        accuracies=accuracies_of(groups),
        compared=[group.label for group in first],
        others=len(groups) - len(first),
        comparison=comparison,
        charts=over_values + charts_of(curves),
        constants=list(constants(curves).values()),
        number_of_values=len(over_values),
        axes={group.label: axes_of(group.runs[0]) for group in first},
    )


def accuracies_of(groups: Sequence[Group]) -> dict[str, Interval]:
    """Return the accuracy of each group that was evaluated, by its label: its mean over several seeds.

    The interval is Student's, with the standard deviation over seeds of all groups, as few seeds know little of their
    own; that of a single job is over its problems.
    """
    several = [group.accuracies for group in groups if len(group.accuracies) > 1]
    freedom = sum(len(numbers) - 1 for numbers in several)
    squares = sum((number - mean(numbers)) ** 2 for numbers in several for number in numbers)
    spread = (T[freedom - 1] if freedom <= len(T) else NORMAL) * (squares / freedom) ** 0.5 if several else 0.0
    intervals = {group.label: interval(group.runs[0]) for group in groups if len(group.accuracies) == 1}
    for group in groups:
        if len(group.accuracies) > 1:
            middle, half = mean(group.accuracies), spread / len(group.accuracies) ** 0.5
            intervals[group.label] = middle, max(0.0, middle - half), min(1.0, middle + half)
    return intervals


def status_of(sweep: Sweep) -> str:
    """Return `running` while a job is, then `completed`, or `failed` if a job has not been completed."""
    if any(run.status == "running" for run in sweep.runs):
        return "running"
    return "failed" if sweep.failed else "completed"


def keys_of(sweep: Sweep) -> tuple[list[str], list[str]]:
    """Return the swept settings and the swept seeds; in a sweep of nothing but seeds these are the settings."""
    seeds = [key for key in sweep.varied if key.endswith("seed")]
    settings = [key for key in sweep.varied if key not in seeds]
    return (settings, seeds) if settings else (seeds, [])


def groups_of(sweep: Sweep, settings: Sequence[str]) -> list[Group]:
    """Return the jobs of a sweep by their settings, in the order of these values."""
    by_label: dict[str, list[Run]] = {}
    for run in sorted(sweep.runs, key=lambda run: [order(sweep.value(run, key)) for key in settings]):
        by_label.setdefault(label_of(settings, sweep, run), []).append(run)
    return [Group(label, sorted(runs, key=quality, reverse=True)) for label, runs in by_label.items()]


def label_of(keys: Sequence[str], sweep: Sweep, run: Run) -> str:
    """Return values of a job, such as `num_generations=4, beta=0`; without keys the name of the job."""
    return ", ".join(f"{key.rpartition('.')[2]}={sweep.value(run, key)}" for key in keys) or sweep.name(run)


def quality(run: Run) -> tuple[float, float]:
    """Return accuracy, then reward: the order of runs."""
    return run.accuracy or 0.0, run.reward or 0.0


def charts_over_values(sweep: Sweep, groups: Sequence[Group], settings: Sequence[str]) -> list[Chart]:
    """Return the charts of accuracy, and after them those of memory, over the values of each setting."""
    accuracies = accuracies_of(groups)
    over = {key: by_value(sweep, groups, key) for key in settings}
    before = {run.evaluation["before"]["accuracy"] for run in sweep.runs if "before" in run.evaluation}
    common = before.pop() if len(before) == 1 else None
    charts = []
    for key, values in over.items() if accuracies else ():
        others = [other for other in settings if other != key]
        known = {
            value: [group for group in of_value if group.label in accuracies] for value, of_value in values.items()
        }
        points = {value: [accuracies[group.label] for group in of_value] for value, of_value in known.items()}
        labels = {
            value: [label_of(others, sweep, group.runs[0]) if others else "" for group in of_value]
            for value, of_value in known.items()
        }
        several = len({label for of_value in labels.values() for label in of_value}) <= MOST
        title = f"Held-out accuracy over {key}"
        charts.append(accuracy_by_value(title, points, common, labels if several else None))
    for key, values in over.items():
        runs = {value: [run for group in of_value for run in group.runs] for value, of_value in values.items()}
        peaks = {
            value: max(filter(None, (run.peak_gb for run in of_value)), default=None)
            for value, of_value in runs.items()
        }
        charts.append(bars(f"Peak memory over {key}, GiB", peaks, "GiB"))
    return charts


def by_value(sweep: Sweep, groups: Sequence[Group], key: str) -> dict[str, list[Group]]:
    """Return groups by their values of a setting, in the order of these."""
    values: dict[str, list[Group]] = {}
    for group in sorted(groups, key=lambda group: order(sweep.value(group.runs[0], key))):
        values.setdefault(sweep.value(group.runs[0], key), []).append(group)
    return values


def interval(run: Run) -> Interval:
    """Return the accuracy after training with its 95 % interval."""
    after = run.evaluation["after"]
    return (after["accuracy"], *after["interval"])


def order(text: str) -> tuple[bool, float, str]:
    """Return a sort key: numbers by size, then texts."""
    try:
        return False, float(text), ""
    except ValueError:
        return True, 0.0, text
