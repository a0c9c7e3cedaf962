"""`python -m grpo.report DIR…` writes `report.html`: one self-contained page about a run, or about a sweep."""

import argparse
import logging
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from grpo.cli import leave
from grpo.reporting.content import completions_of, content_of
from grpo.reporting.page import write_report
from grpo.reporting.text import show_content
from grpo.rundir.run_dir import read_run
from grpo.utils.errors import ConfigError

PROGRAM = "grpo.report"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split(":")[0])
    parser.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="the directory of a run or of a sweep")
    parser.add_argument("--text", action="store_true", help="print the page of a run instead of writing it")
    logging.basicConfig(level=logging.ERROR)
    try:
        given = parser.parse_args()
        for folder in given.folders:
            if given.text:
                run = read_run(folder)
                show_content(content_of(run, completions_of(run)), Console())
            else:
                print(write_report(folder))
    except (ConfigError, OmegaConfBaseException, OSError, ValueError) as error:
        leave(error, PROGRAM)


if __name__ == "__main__":
    main()
