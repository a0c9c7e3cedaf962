"""The table and the last lines that a run prints at its end."""

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from grpo.rundir.files import read_json
from grpo.utils.spoken import shown
from grpo.utils.terminal import plain_console


def report(summary: dict[str, Any], run_dir: Path) -> None:
    """Print the outcome as a table, and then the lines of `last_lines`."""
    table = Table(title=f"GRPO run {summary['status']}", show_header=False, title_justify="left")
    evaluation = read_json(run_dir / "evaluation.json")
    for when, outcome in evaluation.items():
        table.add_row(f"accuracy {when}", with_interval(outcome["accuracy"], outcome["interval"]))
        for name, part in outcome.get("by_task", {}).items():
            table.add_row(f"  {name}", with_interval(part["accuracy"], part["interval"]))
    if evaluation:
        table.add_row("held out", f"{next(iter(evaluation.values()))['samples']} problems, answered greedily")
    for name, kinds in summary.get("reward_errors", {}).items():
        counts = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
        table.add_row(f"reward.{name}", f"skipped: {counts}", style="red")
    for row in memory_rows(summary):
        table.add_row(*row)
    table.add_row("run directory", shown(run_dir))
    console = plain_console()
    console.print(table)
    for line in last_lines(summary, run_dir, console.is_terminal):
        console.print(line, soft_wrap=True)


def last_lines(summary: dict[str, Any], run_dir: Path, links: bool) -> list[str]:
    """Return the result, the number of findings with the first of them, the page, and the next command.

    With `links` the page is an address that a terminal opens.
    """
    accuracies = [summary.get(f"accuracy_{when}") for when in ("before", "after")]
    result = " -> ".join(f"{accuracy:.1%}" for accuracy in accuracies if accuracy is not None)
    steps = summary.get("steps", 0)
    done = f"{steps} step{'s' * (steps != 1)}, {summary['wall_time_s']:.0f} s"
    lines = [f"accuracy {result}, {done}" if result else done]
    page, name = run_dir / "report.html", shlex.quote(shown(run_dir))
    findings = read_json(run_dir / "report.json").get("findings", [])
    if page.is_file():
        count = f"{len(findings)} findings, the first" if len(findings) > 1 else "1 finding"
        lines.append(f"{count}: {findings[0]['title']}" if findings else "no issues found")
        lines.append(f"page: {page.absolute().as_uri() if links else shown(page)}")
    if summary["status"] == "stopped":
        return lines  # the command says how to continue
    if findings:
        lines.append(f"next: python -m grpo.report --text {name}    # evidence and advice of each finding")
    elif (run_dir / "model").is_dir():
        lines.append(f"next: python -m grpo.export {name}    # a folder for from_pretrained and vllm serve")
    return lines


def with_interval(value: float, interval: Sequence[float]) -> str:
    """Return a proportion with its 95 % interval, as text in percent."""
    low, high = interval
    return f"{value:.1%}  (95 % interval {low:.1%} to {high:.1%})"


def memory_rows(summary: dict[str, Any]) -> list[tuple[str, str]]:
    """Return rows of the table with the memory of a run, used and planned."""
    planned = summary["planned_gb"] or {}
    host = f"{summary['memory/host_gb']:.2f} GiB of host memory"
    used, rest = host, list[str]()
    if "memory/peak_allocated_gb" in summary:
        used = f"{summary['memory/peak_allocated_gb']:.2f} GiB of GPU memory"
        used, rest = f"{used} ({summary['memory/peak_reserved_gb']:.2f} GiB reserved)", [host]
    for phase in ("generate", "reward", "logprobs", "update"):
        if planned and f"memory/{phase}_gb" in summary:
            measured = summary[f"memory/{phase}_gb"]
            rest.append(f"{phase}: planned {planned[phase]:.2f} GiB, used {measured:.2f} GiB")
    first = f"planned {planned['peak']:.2f} GiB, used {used}" if planned else used
    return [("peak memory", first), *(("", text) for text in rest)]
