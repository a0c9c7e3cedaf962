"""Write the page of a run, or of a sweep: `python -m grpo.report DIR…` writes `report.html`, one self-contained file.

Several runs are compared: on a page of their own, `comparison.html` in the current directory.
`--watch` serves it on the loopback interface instead, while the run or the sweep goes on.
A directory of runs, as `outputs`, is printed as a table.
"""

import logging
from argparse import Namespace
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from rich.table import Table

from grpo.cli import leave
from grpo.extras.page.watch import watch
from grpo.reporting.comparison import comparison_of
from grpo.reporting.content import completions_of, content_of, followed
from grpo.reporting.listing import COLUMNS, listed, runs_in
from grpo.reporting.page import named, write_comparison, write_report
from grpo.reporting.text import show_comparison, show_content
from grpo.rundir.history import named_run
from grpo.rundir.run_dir import is_run, read_run
from grpo.rundir.sweep_dir import is_sweep
from grpo.utils.errors import ConfigError
from grpo.utils.terminal import plain_console
from rewards.checking import Parser
from rewards.probing.runs import LATEST

PROGRAM = "grpo.report"


def main() -> None:
    """Run the command line."""
    parser = Parser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument(
        "folders", nargs="+", metavar="DIR", help="the directory of a run, of a sweep or of runs, or latest"
    )
    parser.add_argument("--text", action="store_true", help="print the pages of runs instead of writing them")
    parser.add_argument("--watch", action="store_true", help="serve the page on 127.0.0.1 instead of writing it")
    parser.add_argument("--port", type=int, help="of --watch; 8000 by default, 0 for any free one")
    parser.add_argument("--sort", choices=COLUMNS, help="column of the table for a directory of runs; default: date")
    parser.add_argument(
        "--filter", action="append", default=[], metavar="COLUMN=TEXT", help="of that table, the rows with this text"
    )
    logging.basicConfig(level=logging.ERROR)
    try:
        args = parser.parse_args()
        folders = [folder_of(word, args.text) for word in args.folders]
        if table := table_of(folders, args):
            plain_console().print(table, crop=False)
            return
        if args.watch:
            (folder, *others) = folders
            if others or args.text:
                raise ConfigError("--watch: name one directory, without --text")
            watch(folder, 8000 if args.port is None else args.port)
            return
        if args.port is not None:
            raise ConfigError(f"--port={args.port}: only --watch serves the page")
        runs = [folder for folder in folders if not is_sweep(folder)]
        compared = named(runs) if len(folders) > 1 else {}
        for folder in folders:
            if args.text:
                run = read_run(folder)
                show_content(content_of(run, completions_of(run), followed(run)), plain_console())
            else:
                print(write_report(folder))
        if len(compared) > 1 and args.text:
            show_comparison(comparison_of(compared), plain_console())
        elif len(compared) > 1:
            print(write_comparison(compared, Path()))
    except (ConfigError, OmegaConfBaseException, OSError, ValueError) as error:
        leave(error, PROGRAM)


def table_of(folders: list[Path], args: Namespace) -> Table | None:
    """Return the table of directories of runs; None for runs and sweeps, and with `--watch`."""
    several = [folder for folder in folders if not (is_run(folder) or is_sweep(folder)) and runs_in(folder)]
    if several and not args.watch:
        if missing := [folder for folder in folders if not folder.exists()]:
            raise ConfigError(f"{missing[0]}: there is no such directory")
        if len(several) < len(folders):
            raise ConfigError(f"{several[0]}: a directory of runs is listed, and not beside a run; name it alone")
        return listed(several, args.sort or "date", args.filter)
    if args.sort or args.filter:
        raise ConfigError("--sort, --filter: for a directory of runs, as outputs; the page of a sweep has its table")
    return None


def folder_of(word: str, text: bool) -> Path:
    """Return the directory that a word names; for a page, `latest` is the sweep if a job of it was started last."""
    folder = named_run(word)
    return folder.parent if word == LATEST and is_sweep(folder.parent) and not text else folder


if __name__ == "__main__":
    main()
