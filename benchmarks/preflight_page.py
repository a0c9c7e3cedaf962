"""Parts of the documentation about the runs of `benchmarks.preflight`."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.pages import ROOT, write_part
from grpo.extras.preflight.verdict import percent

PAGE, FINDINGS_PAGE = ROOT / "docs" / "calibration.md", ROOT / "docs" / "report.md"
MODULE = "benchmarks.preflight"
CLOSE = math.sqrt(10)
"""Factor within which a suggested rate is near the best."""
ENDS = ("before", "after")
Result = dict[str, Any]


def write(results: Sequence[Result], total: Result) -> None:
    """Write the parts; `total` is the summary of the results."""
    parts = (of_all(total), of_kinds(results), of_misses(results), of_rates(results))
    write_part(PAGE, MODULE, "\n".join(parts))
    write_part(FINDINGS_PAGE, MODULE, of_findings(results))


def of_all(total: Result) -> str:
    """Return how often forecasts were right, in Markdown."""
    right = (
        f"{total['right']} of {total['runs']} verdicts are correct; {total['forecast_but_did_not_rise']} runs were to"
    )
    near = f"{total['near']} of {total['compared']} fractions of groups with non-zero variance are within 5 percentage"
    means = [f"{100 * total[name]:.1f}" for name in ("mean_difference", "mean_absolute_difference")]
    return (
        f"- {right}\n  learn and did not, {total['rose_but_not_forecast']} learned against the forecast.\n"
        f"- {near}\n  points, and {total['in_interval']} within the interval. The mean difference is {means[0]} "
        f"points, the mean absolute difference {means[1]}.\n"
    )


def of_kinds(results: Sequence[Result]) -> str:
    """Return a row per kind of run in Markdown."""
    lines = [
        "| runs that differ in | runs | within 5 points | accuracy rose | verdict correct |",
        "|---|---|---|---|---|",
    ]
    for kind in dict.fromkeys(kind_of(result) for result in results):
        runs = [result for result in results if kind_of(result) == kind]
        known = [run["near"] for run in runs if "near" in run]
        near = f"{sum(known)} of {len(known)}" if known else ""
        rose, right = (
            sum(counted) for counted in ([run["run"]["rose"] for run in runs], [run["right"] for run in runs])
        )
        name = kind if runs[0]["can_learn"] else f"*cannot learn:* {kind}"
        lines.append(f"| {name} | {len(runs)} | {near} | {rose} | {right} |")
    return "\n".join(lines) + "\n"


def kind_of(result: Result) -> str:
    """Return the kind of a run; that of all sweeps is one."""
    return "learning rate, 20 steps" if result["kind"].startswith("sweep ") else str(result["kind"])


def of_misses(results: Sequence[Result]) -> str:
    """Return the runs whose verdict is wrong, in Markdown."""
    lines = ["| incorrect verdict about | forecast | accuracy |", "|---|---|---|"]
    for result in results:
        if not result["right"]:
            rise = " to ".join("?" if result["run"][when] is None else percent(result["run"][when]) for when in ENDS)
            lines.append(f"| `{result['line']}` | {result['forecast']['verdict'].partition(':')[0]} | {rise} |")
    return "\n".join(lines) + "\n"


def sweeps(results: Sequence[Result]) -> dict[str, list[Result]]:
    """Return the runs of each sweep over the learning rate, by what they share."""
    kinds = dict.fromkeys(result["kind"] for result in results if result["kind"].startswith("sweep "))
    return {kind.removeprefix("sweep "): [run for run in results if run["kind"] == kind] for kind in kinds}


def rate_of(result: Result) -> float:
    """Return the learning rate of a run of a sweep."""
    return float(result["line"].rpartition("=")[2])


def best_rates(runs: Sequence[Result]) -> list[float]:
    """Return the rates with the highest accuracy after the run, and those that answer at most 2 of 200 fewer."""
    highest = max(run["run"]["after"] or 0.0 for run in runs)
    return [rate_of(run) for run in runs if (run["run"]["after"] or 0.0) >= highest - 0.01]


def is_near(runs: Sequence[Result]) -> bool:
    """Return whether the rate that the forecasts of a sweep suggest is near one of the best."""
    suggested = runs[0]["forecast"]["suggested_rate"]
    return any(max(suggested / rate, rate / suggested) <= CLOSE for rate in best_rates(runs))


def of_rates(results: Sequence[Result]) -> str:
    """Return the table of sweeps in Markdown."""
    lines = ["| run, 20 steps | accuracy by learning rate | suggested | best |", "|---|---|---|---|"]
    for line, runs in sweeps(results).items():
        accuracies = ", ".join(f"{rate_of(run):g}: {percent(run['run']['after'] or 0.0)}" for run in runs)
        suggested = f"{runs[0]['forecast']['suggested_rate']:.1g}"
        best = ", ".join(f"{rate:g}" for rate in best_rates(runs))
        lines.append(f"| `{line}` | {accuracies} | {suggested}{' !' * (not is_near(runs))} | {best} |")
    near = sum(map(is_near, sweeps(results).values()))
    lines += [
        "",
        f"In {near} of {len(sweeps(results))} sweeps the suggested rate is within a factor of 3.2 of a best one.",
    ]
    return "\n".join(lines) + "\n"


def of_findings(results: Sequence[Result]) -> str:
    """Return the table of findings about learning, by whether the accuracy rose, in Markdown."""
    read = [result["run"] for result in results if "findings" in result["run"]]
    names = dict.fromkeys(name for run in read for name in run["findings"])
    lines = ["| finding | accuracy rose | accuracy did not rise |", "|---|---|---|"]
    rose = [run["rose"] for run in read]
    for name in sorted(names):
        counts = [sum(name in run["findings"] and run["rose"] is wanted for run in read) for wanted in (True, False)]
        lines.append(f"| `{name}` | {counts[0]} | {counts[1]} |")
    lines.append(f"| runs | {sum(rose)} | {len(rose) - sum(rose)} |")
    return "\n".join(lines) + "\n"
