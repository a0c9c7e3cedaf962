"""The command: `python -m benchmarks.measured [FOLDER] [--output measured.png]`."""

import argparse
import sys
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from grpo.config.schema import ROOT
from grpo.extras.measuring.record import read_record
from grpo.utils.errors import ConfigError

HERE = Path(__file__).parent
Record = dict[str, Any]


def read_all(folder: Path) -> list[Record]:
    """Return the content of all files of a folder, in the order of their names.

    Raises:
        ConfigError: a file breaks the schema, or there is none.
    """
    files = sorted(folder.glob("*.json"))
    if not files:
        raise ConfigError(f"{folder}: no measure-*.json; `python -m grpo.measure` writes one")
    return [read_record(file) for file in files]


def by_method(record: Record) -> dict[str, list[Record]]:
    """Return the cases of a file by method."""
    methods: dict[str, list[Record]] = {}
    for case in record["cases"]:
        methods.setdefault(case["method"], []).append(case)
    return methods


def ratios(cases: list[Record], phase: str) -> list[float]:
    """Return planned over measured memory of the measured cases that have a phase, lowest first."""
    pairs = ((case["planned_gb"], case["measured_gb"]) for case in cases if case["outcome"] == "measured")
    return sorted(planned[phase] / measured[phase] for planned, measured in pairs if phase in measured)


def as_table(records: list[Record]) -> Table:
    """Return a table of planned over measured memory: a row per GPU and method, lowest to highest."""
    table = Table("GPU", "method", "peak", "generate", "logprobs", "update", "retried", "no result")
    for record in records:
        for method, cases in by_method(record).items():
            cells = []
            for phase in ("peak", "generate", "logprobs", "update"):
                found = ratios(cases, phase)
                low, high = (f"{found[0]:.2f}", f"{found[-1]:.2f}") if found else ("", "")
                cells.append(low if low == high else f"{low} to {high}")
            retried = sum(bool(case.get("oom_retries")) for case in cases)
            lacking = [case["outcome"] for case in cases if case["outcome"] != "measured"]
            table.add_row(record["device"], method, *cells, str(retried or ""), ", ".join(lacking))
        table.add_section()
    return table


def draw(records: list[Record], file: Path) -> None:
    """Draw planned against measured peaks, a colour per GPU, on logarithmic axes."""
    figure = Figure(figsize=(6.4, 6.0))
    axes = figure.subplots()
    for record in records:
        done = [case for case in record["cases"] if case["outcome"] == "measured"]
        measured = [case["measured_gb"]["peak"] for case in done]
        axes.scatter(measured, [case["planned_gb"]["peak"] for case in done], s=22, label=record["device"])
    axes.set(xscale="log", yscale="log", xlabel="measured peak, GiB", ylabel="planned peak, GiB")
    low, high = min(*axes.get_xlim(), *axes.get_ylim()), max(*axes.get_xlim(), *axes.get_ylim())
    axes.plot([low, high], [low, high], color="0.5", linewidth=1, zorder=0.5, label="planned = measured")
    axes.fill_between(
        [low, high], [low * 0.85, high * 0.85], [low * 1.15, high * 1.15], color="0.9", label="15 %", zorder=0
    )
    axes.set(xlim=(low, high), ylim=(low, high))
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_formatter("{x:g}")
        axis.set_minor_formatter("{x:g}")
    axes.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(file, dpi=150)


def main() -> None:
    """Validate, print and draw."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.measured", description=__doc__)
    parser.add_argument("folder", nargs="?", type=Path, default=HERE, help="of the files; default: benchmarks/measured")
    parser.add_argument("--output", type=Path, default=ROOT / "docs" / "measured.png", help="the picture")
    options = parser.parse_args()
    try:
        records = read_all(options.folder)
    except ConfigError as error:
        print(f"benchmarks.measured: {error}", file=sys.stderr)
        sys.exit(2)
    console = Console()
    console.print("planned / measured memory, lowest to highest case", highlight=False)
    console.print(as_table(records))
    if all(record["device"] == "cpu" for record in records):
        console.print("no GPU has been measured yet: these are small tensors on a CPU", highlight=False)
    draw(records, options.output)
    console.print(f"{options.output}", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
