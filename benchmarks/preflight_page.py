"""Parts of the documentation about the runs of `benchmarks.preflight`."""

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.pages import ROOT, write_part

PAGE, FINDINGS_PAGE = ROOT / "docs" / "preflight.md", ROOT / "docs" / "report.md"
MODULE = "benchmarks.preflight"
CLOSE = math.sqrt(10) * 1.1
"""Factor within which a suggested rate is near the best: rates of a sweep are about a factor of 3 apart."""
Result = dict[str, Any]


def write(results: Sequence[Result]) -> None:
    """Write the parts."""
    write_part(PAGE, MODULE, of_rates(results))
    write_part(FINDINGS_PAGE, MODULE, of_findings(results))


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
        accuracies = ", ".join(f"{rate_of(run):g}: {(run['run']['after'] or 0):.0%}" for run in runs)
        suggested = f"{runs[0]['forecast']['suggested_rate']:.1g}"
        best = ", ".join(f"{rate:g}" for rate in best_rates(runs))
        lines.append(f"| `{line}` | {accuracies} | {suggested}{' !' * (not is_near(runs))} | {best} |")
    return "\n".join(lines) + "\n"


def of_findings(results: Sequence[Result]) -> str:
    """Return the table of findings about learning, by whether the accuracy rose, in Markdown."""
    names = dict.fromkeys(name for result in results for name in result["run"]["findings"])
    lines = ["| finding | accuracy rose | accuracy did not rise |", "|---|---|---|"]
    rose = [result["run"]["rose"] for result in results]
    for name in sorted(names):
        counts = [
            sum(name in result["run"]["findings"] and result["run"]["rose"] is wanted for result in results)
            for wanted in (True, False)
        ]
        lines.append(f"| `{name}` | {counts[0]} | {counts[1]} |")
    lines.append(f"| runs | {sum(rose)} | {len(rose) - sum(rose)} |")
    return "\n".join(lines) + "\n"
