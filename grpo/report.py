"""`python -m grpo.report DIR…` writes `report.html`: one self-contained page about a run, or about a sweep."""

import argparse
import logging
from pathlib import Path

from omegaconf.errors import OmegaConfBaseException

from grpo.cli import leave
from grpo.reporting.page import write_report
from grpo.utils.errors import ConfigError

PROGRAM = "grpo.report"


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog=f"python -m {PROGRAM}", description=__doc__.split(":")[0])
    parser.add_argument("folders", nargs="+", metavar="DIR", type=Path, help="the directory of a run or of a sweep")
    logging.basicConfig(level=logging.ERROR)
    try:
        for folder in parser.parse_args().folders:
            print(write_report(folder))
    except (ConfigError, OmegaConfBaseException, OSError, ValueError) as error:
        leave(error, PROGRAM)


if __name__ == "__main__":
    main()
