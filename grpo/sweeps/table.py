"""What the jobs of a sweep came to, a row each."""

import os

from rich.console import Console
from rich.table import Table
from rich.text import Text

from grpo.rundir.sweep_dir import COLUMNS, Sweep


def print_sweep(sweep: Sweep) -> None:
    """Print a row for each job."""
    table = Table(
        title=f"GRPO sweep {os.path.relpath(sweep.folder)}",
        title_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    for heading in ("job", *sweep.varied, "status"):
        name = heading.rpartition(".")[2]
        table.add_column(name, overflow="fold", min_width=9 if heading == "status" else len(name))
    for heading in COLUMNS:
        table.add_column(heading, justify="right", no_wrap=True)
    for run in sweep.runs:
        cells = [cell(run) for cell in COLUMNS.values()]
        values = [Text(sweep.value(run, key)) for key in sweep.varied]  # brackets in them are no markup
        table.add_row(sweep.name(run), *values, run.status, *cells)
    Console().print(table)
