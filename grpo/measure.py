"""Compare plan and peak memory on the GPU of this machine: `python -m grpo.measure` writes `measure-GPU.json`.

Updates of random policies by several methods, each in a process of its own, in at most ten minutes and without a
download; without a GPU small ones on the CPU. The file has planned and measured memory, seconds, versions, driver and
the GPU's name and memory, and nothing else of the machine: docs/measure.md.
"""

import argparse
import logging
import os
import signal
import tempfile
import time
from pathlib import Path
from typing import Any

from hydra import initialize_config_dir
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from grpo.cli import check_can_train, leave
from grpo.config.schema import ROOT, register
from grpo.extras.measuring.cases import Case, cases
from grpo.extras.measuring.processes import in_process
from grpo.extras.measuring.record import as_row, machine, slug
from grpo.rundir.files import write_json
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.hardware import check_pytorch_sees_gpu, free_gpu_memory, take_one_gpu, use_expandable_segments
from grpo.utils.terminal import plain_console
from rewards.checking import Parser

PROGRAM = "grpo.measure"


def main() -> None:
    """Run the command line."""
    parser = Parser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), help="default: cuda where there is a GPU")
    parser.add_argument("--minutes", type=float, default=10, help="the file has the cases until then; default: 10")
    parser.add_argument("--cases", type=int, metavar="N", help="the first N cases only; default: all")
    parser.add_argument("--output", type=Path, default=Path(), help="folder of the file; default: the current folder")
    options = parser.parse_args()
    logging.basicConfig(level=logging.ERROR)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which the background ignores
    try:
        check_can_train()
        check_positive("minutes", options.minutes)
        check_positive("cases", options.cases)
        check_writable(options.output)
        device = prepared_device(options.device)
        about = machine(device)
        file = options.output / f"measure-{slug(about['device'])}.json"
        register()
        with initialize_config_dir(str(ROOT / "conf"), version_base="1.3"):
            chosen = cases(device)[: options.cases]
        left = measure_all(chosen, device, 60 * options.minutes, about, file)
    except (ConfigError, RunError) as error:
        leave(error, PROGRAM)
    rest = f"; not done in {options.minutes:g} minutes: {left} cases" if left else ""
    plain_console().print(f"{file}{rest}")


def prepared_device(wanted: str | None) -> str:
    """Return the device, `cuda` or `cpu`, and prepare this process's environment, which the cases inherit.

    Raises:
        ConfigError: a GPU is wanted and there is none, or PyTorch cannot use it.
    """
    if wanted == "cpu" or (wanted is None and not free_gpu_memory()):
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        return "cpu"
    if not free_gpu_memory():
        raise ConfigError("--device=cuda: no GPU was found; leave it out to measure small updates on the CPU")
    take_one_gpu()
    check_pytorch_sees_gpu()
    use_expandable_segments()
    return "cuda"


def check_positive(name: str, value: float | None) -> None:
    """Raise a ConfigError for a number that is given and not positive."""
    if value is not None and not value > 0:
        raise ConfigError(f"--{name}={value:g}: a positive number is needed")


def check_writable(folder: Path) -> None:
    """Raise a ConfigError unless files can be written into a folder, before anything is measured."""
    if not folder.is_dir():
        raise ConfigError(f"--output={folder}: no such folder; create it first")
    try:
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(f"--output={folder}: cannot be written ({error.strerror}); name another folder") from error


def measure_all(chosen: list[Case], device: str, seconds: float, about: dict[str, Any], file: Path) -> int:
    """Measure cases until the time is over, and write the file after each; return how many are left.

    Raises:
        RunError: the user has interrupted it; the file has the cases so far.
    """
    console, until, rows = plain_console(), time.monotonic() + seconds, list[dict[str, Any]]()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    try:
        with Progress(*columns, console=console, transient=True) as progress:
            task = progress.add_task("", total=len(chosen))
            for case in chosen:
                progress.update(task, description=case.name)
                result, trace = in_process(case, device, until - time.monotonic())
                if result is None:
                    break
                rows.append(as_row(case, result))
                write_json(file, about | {"cases": rows})
                progress.advance(task)
                if trace:
                    console.print(trace, soft_wrap=True)
    except KeyboardInterrupt:
        raise RunError(f"interrupted; {file} has the first {len(rows)} cases", status=130) from None
    console.print(as_table(rows))
    return len(chosen) - len(rows)


def as_table(rows: list[dict[str, Any]]) -> Table:
    """Return a table of the cases: planned and measured peak, their ratio, and seconds."""
    table = Table("model, layers", "method", "tokens", "planned GiB", "measured GiB", "ratio", "s/update")
    for row in rows:
        tokens = f"{row['prompt']}+{row['completion']}"
        planned = row["planned_gb"]["peak"]
        numbers = [f"{planned:.2f}", row.get("error", row["outcome"])]
        if row["outcome"] == "measured":
            measured = row["measured_gb"]["peak"]
            numbers = [
                f"{planned:.2f}",
                f"{measured:.2f}",
                f"{planned / measured:.2f}",
                f"{row['seconds_per_update']:.2f}",
            ]
        table.add_row(f"{row['model']}, {row['layers']}", row["method"], tokens, *numbers)
    return table


if __name__ == "__main__":
    main()
