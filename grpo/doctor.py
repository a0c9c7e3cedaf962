"""Diagnose a run of any trainer: `python -m grpo.doctor PATH`, its logs or its directory.

Reads TRL's trainer_state.json and tables of completions, logs of verl and ms-swift, events of TensorBoard, exports of
W&B, and run directories of this project. Nothing is loaded that could run code, such as training_args.bin.
"""

import argparse
import json
from pathlib import Path
from typing import Any

from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from rich.text import Text

from grpo.cli import leave
from grpo.extras.doctor.diagnose import diagnose, open_questions
from grpo.extras.doctor.diagnosis import Diagnosis
from grpo.extras.doctor.plan import commands
from grpo.extras.doctor.read import read
from grpo.extras.trl_options.read import options_of
from grpo.rundir.history import named_run
from grpo.utils.errors import ConfigError
from grpo.utils.terminal import plain_console
from rewards.checking import Parser

PROGRAM = "grpo.doctor"
STYLES = {"error": "bold red", "warning": "bold yellow", "info": "bold"}


def main() -> None:
    """Run the command line."""
    parser = Parser(
        prog=f"python -m {PROGRAM}", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", metavar="PATH", help="a log, or the directory of a run; latest: of this project")
    parser.add_argument("--config", type=Path, metavar="FILE", help="TRL's YAML, or the script with its command")
    parser.add_argument("--json", action="store_true", help="print the findings as JSON")
    args = parser.parse_args()
    try:
        if args.config:
            options_of([str(args.config)])  # an error is said before logs are read
        path = named_run(args.path)
        history, run = read(path)
        diagnoses, questions = diagnose(history, run), open_questions(history)
    except OSError as error:
        leave(ConfigError(f"{error.filename or args.path}: {error.strerror}"), PROGRAM)
    except (ConfigError, OmegaConfBaseException) as error:
        leave(error, PROGRAM)
    content: dict[str, Any] = {
        "source": history.source,
        "steps": [history.steps[0]["step"], history.steps[-1]["step"]],
        "logged": len(history.steps),
        "completions": len(history.completions),
        "findings": [diagnosis.as_dict() for diagnosis in diagnoses],
        "not_judged": questions,
        "notes": history.notes,
        "plan": [] if run else commands(path, args.config),
    }
    if args.json:
        print(json.dumps(content, indent=2))
    else:
        show(content, diagnoses, plain_console())


def show(content: dict[str, Any], diagnoses: list[Diagnosis], console: Console) -> None:
    """Print the findings, what could not be judged, and how to plan the same run here."""

    def say(text: str, head: str = "", style: str = "") -> None:
        console.print(Text.assemble((head, style), printable(text)), soft_wrap=True)

    first, last = content["steps"]
    say(
        f"{content['source']}: steps {first} to {last}, {content['logged']} logged, {content['completions']} "
        "completions"
    )
    for note in content["notes"]:
        say(note)
    if not any(diagnosis.severity != "info" for diagnosis in diagnoses):
        say("", "no issues found", "bold green")
    for diagnosis in diagnoses:
        say(f": {diagnosis.title}", diagnosis.severity, STYLES[diagnosis.severity])
        say(f"    {diagnosis.evidence}")
        say(f"    {diagnosis.advice}")
    if content["not_judged"]:
        say(f"not judged, as not logged: {'; '.join(content['not_judged'])}")
    for line in content["plan"]:
        say(f"the same run here: {line}")


def printable(text: str) -> str:
    """Return a text with escapes for characters that control a terminal: names and paths are others' text."""
    return "".join(character if character.isprintable() else repr(character)[1:-1] for character in text)


if __name__ == "__main__":
    main()
