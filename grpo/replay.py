"""Compute a step of a run again: `python -m grpo.replay RUN [step=57] [reward.NAME.fn=…]`.

It takes the checkpoint before the step and the stored rollouts, and compares rewards, advantages, log-probabilities,
loss, gradient and weights with those of the run. With other options of a reward it scores the stored completions anew.
Runs with `replay.keep=…` keep what it needs.
"""

import json
import logging
import re
import sys
from functools import partial
from pathlib import Path

from hydra.errors import HydraException

from grpo.cli import leave, quick_imports
from grpo.rundir.history import named_run
from grpo.utils.errors import ConfigError, RunError
from grpo.utils.terminal import plain_console
from grpo.utils.waiting import Waiting
from rewards.checking import Parser

PROGRAM = "grpo.replay"


def main() -> None:
    """Run the command line."""
    parser = Parser(prog=f"python -m {PROGRAM}", description=__doc__)
    parser.add_argument("run", metavar="RUN", help="directory of a run, or latest")
    words = "the last step by default; or reward.NAME.KEY=VALUE"
    parser.add_argument("words", nargs="*", default=[], metavar="step=N", help=words)
    parser.add_argument("--json", action="store_true", help="print the result as JSON")
    args = parser.parse_intermixed_args()
    logging.basicConfig(level=logging.ERROR)
    try:
        step, overrides = wanted(args.words)
        status = replay(named_run(args.run), step, overrides, args.json)
    except (ConfigError, RunError, HydraException, OSError, ValueError) as error:
        leave(error, PROGRAM)
    except KeyboardInterrupt:
        leave(RunError("interrupted", status=130), PROGRAM)
    sys.exit(status)


def wanted(words: list[str]) -> tuple[int | None, list[str]]:
    """Return the step, None if there is none, and the overrides of rewards.

    Raises:
        ConfigError: a word is neither.
    """
    step, overrides = None, []
    for word in words:
        if step is None and (match := re.fullmatch(r"step=([1-9]\d*)", word)):
            step = int(match[1])
        elif re.match(r"\+*reward\.\w+\.(fn|kwargs[\w.]*)=", word):
            overrides.append(word)
        else:
            raise ConfigError(
                f"{word}: behind the run stands one step=N, from 1, or reward.NAME.fn=…, reward.NAME.kwargs.KEY=…"
            )
    return step, overrides


def replay(run: Path, step: int | None, overrides: list[str], as_json: bool) -> int:
    """Compute a step again, print the result, and return the exit status: 1 if it differs.

    Raises:
        ConfigError: the run has not kept what this needs.
        RunError: the step could not be computed.
    """
    console = plain_console(stderr=True)
    with quick_imports(), Waiting(console, "loading libraries"):
        from grpo.extras.replay.report import repeated, show, verdict
    result = repeated(run, step, overrides, partial(Waiting, console))
    if as_json:
        print(json.dumps(result, indent=2))
    else:
        show(result, plain_console(), rescores=bool(overrides))
    return verdict(result["differences"])


if __name__ == "__main__":
    main()
