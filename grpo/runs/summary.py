"""What a run says of itself at its end."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.runs.files import ERRORS_FILE, read_json

LEFT = (
    "report.html",
    "model",
    "metrics.jsonl",
    "completions",
    "evaluation.json",
    ERRORS_FILE,
    "plan.json",
    "summary.json",
    "train.log",
)


def report(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the outcome as a table."""
    table = Table(title=f"GRPO run {summary['status']}", show_header=False, title_justify="left")
    evaluation = read_json(run_dir / "evaluation.json")
    for when, outcome in evaluation.items():
        table.add_row(f"accuracy {when}", share(outcome["accuracy"], outcome["interval"]))
    if evaluation:
        table.add_row("held out", f"{evaluation['before']['samples']} problems, answered greedily")
    for name, kinds in summary.get("reward_errors", {}).items():
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        table.add_row(f"reward.{name}", f"[red]left out: {counts}[/]")
    for row in memory_rows(summary):
        table.add_row(*row)
    table.add_row("time", f"{summary['wall_time_s']:.0f} s, {summary.get('steps', 0)} steps")
    table.add_row("run directory", os.path.relpath(run_dir))
    for name in LEFT:
        if (run_dir / name).exists():
            table.add_row("", name)
    Console().print(table)


def share(value: float, interval: Sequence[float]) -> str:
    """Return a share with its interval in words."""
    low, high = interval
    return f"{value:.1%}  (95 % interval {low:.1%} to {high:.1%})"


def memory_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return what the run took beside what was planned, GB."""
    planned = summary["planned_gb"] or {}
    host = f"{summary['memory/host_gb']:.1f} GB of host memory"
    if "memory/peak_allocated_gb" not in summary:
        rows = [("peak memory", f"planned {planned['peak']:.1f} GB, used {host}" if planned else host)]
    else:
        used = f"{summary['memory/peak_allocated_gb']:.1f} GB of GPU memory"
        used += f" ({summary['memory/peak_reserved_gb']:.1f} GB reserved)"
        rows = [("peak memory", f"planned {planned['peak']:.1f} GB, used {used}" if planned else used), ("", host)]
    for phase in ("generate", "logprobs", "update"):
        if planned and f"memory/{phase}_gb" in summary:
            rows.append(("", f"{phase}: planned {planned[phase]:.1f} GB, used {summary[f'memory/{phase}_gb']:.1f} GB"))
    return rows
