"""Find where two runs part: `python -m grpo.why RUN_A RUN_B [step=N]`.

For runs that should be equal: the first step and stage in which they differ. For runs that differ on purpose: which of
their differences can be the reason, and which cannot before that step, or before step N. Runs with `replay.keep=…`
keep what it needs. `--replay` computes the step of both again, to find which run repeats itself.
"""

import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

from grpo.cli import leave, quick_imports
from grpo.rundir.history import named_run
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.terminal import plain_console
from grpo.utils.waiting import Waiting
from rewards.checking import Parser

PROGRAM = "grpo.why"


def main() -> None:
    """Run the command line."""
    parser = Parser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument(
        "runs", nargs=2, metavar=("RUN", "OTHER"), help="directories of two runs; latest: the one started last"
    )
    parser.add_argument("step", nargs="?", metavar="step=N", help="compare the steps before step N; all by default")
    parser.add_argument("--replay", action="store_true", help="compute the step in which they part again, of both")
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        run, other = map(named_run, args.runs)
        result = why(run, other, until_of(args.step))
        if args.json:
            print(json.dumps(result, indent=2))
        else:
            show(result)
        if args.replay and result["parts"]:
            replay([run, other], result["parts"]["step"])
    except (ConfigError, RunError, OSError, ValueError) as error:
        leave(error, PROGRAM)
    except KeyboardInterrupt:
        leave(RunError("interrupted", status=130), PROGRAM)
    sys.exit(1 if result["parts"] else 0)


def until_of(word: str | None) -> int | None:
    """Return the step of `step=N`.

    Raises:
        ConfigError: the word is something else.
    """
    if word and not re.fullmatch(r"step=[1-9]\d*", word):
        raise ConfigError(
            f"{word}: two runs are compared; behind them step=N is possible: only the steps before step N"
        )
    return int(word[5:]) if word else None


def why(run: Path, other: Path, until: int | None) -> dict[str, Any]:
    """Return where two runs part.

    Raises:
        ConfigError: a run has not kept what this needs.
    """
    with quick_imports(), Waiting(plain_console(stderr=True), "loading libraries"):
        from grpo.extras.replay.why import compared
    return compared(run, other, until)


def show(result: dict[str, Any]) -> None:
    """Print where two runs part."""
    from grpo.extras.replay.why import show

    show(result, plain_console())


def replay(runs: list[Path], step: int) -> None:
    """Compute a step of runs again, and print on stderr in what it differs.

    Raises:
        ConfigError: a run has not kept what this needs.
        RunError: the step could not be computed.
    """
    from grpo.extras.replay.report import repeated

    for run in runs:
        with Waiting(plain_console(stderr=True), f"computing step {step} of {run} again"):
            summary = repeated(run, step)["summary"]
        print(f"{run}: {summary}", file=sys.stderr)


if __name__ == "__main__":
    main()
