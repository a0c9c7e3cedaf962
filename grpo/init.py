"""Begin a project of your own: `python -m grpo.init my_project` writes data, a task, a reward and an experiment.

They train with the built-in policy, on a CPU in a minute or two; each file is an example to change.
"""

import json
import os
import re
import shlex
from pathlib import Path

from grpo.builtin.tasks.arithmetic import rows
from grpo.cli import leave
from grpo.config.schema import ROOT
from grpo.utils.errors import ConfigError
from rewards.checking import Parser

PROGRAM = "grpo.init"
TEMPLATE = Path(__file__).parent / "extras" / "project" / "template"
"""Files of a project; NAME stands for its name, also in the names of files."""
NO_NAMES = ("null", "true", "false", "inf", "nan")
"""Values in Hydra's grammar that are no text."""
PROBLEMS = 250
"""Rows of the data: 50 are held out."""


def main() -> None:
    """Run the command line."""
    parser = Parser(prog=f"python -m {PROGRAM}", description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="the project's folder, whose name its task and experiment get")
    folder = parser.parse_args().folder
    name = os.path.basename(os.path.abspath(folder))
    try:
        check(folder, name)
        write(folder, name)
    except ConfigError as error:
        leave(error, PROGRAM)
    except OSError as error:
        leave(ConfigError(f"{folder}: {error.strerror}"), PROGRAM)
    for file in sorted(file for file in folder.rglob("*") if file.is_file()):
        print(file)
    print(f"cd {shlex.quote(str(folder))} && python -m grpo.train +experiment={name}    # README.md has the next steps")


def check(folder: Path, name: str) -> None:
    """Raise a ConfigError for a folder with files, or with a name that no choice on a command line can have."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise ConfigError(f"{folder}: there are files in it, or it is a file; name a new folder")
    if not re.fullmatch(r"[A-Za-z][\w-]*", name) or name.lower() in NO_NAMES:
        raise ConfigError(f"{name!r}: the name of a project has letters, digits, _ and -, and begins with a letter")
    if any((ROOT / "conf" / group / f"{name}.yaml").exists() for group in ("task", "experiment")):
        raise ConfigError(f"{name}: this trainer has a task or an experiment of that name; choose another")


def write(folder: Path, name: str) -> None:
    """Write the files of a project; its data are word problems that the built-in policy learns."""
    for file in (path for path in TEMPLATE.rglob("*") if path.is_file() and path.suffix != ".pyc"):
        target = folder / str(file.relative_to(TEMPLATE)).replace("NAME", name)
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(file.read_text(encoding="utf-8").replace("NAME", name), encoding="utf-8")
    lines = (json.dumps(row) + "\n" for row in rows("train", PROBLEMS, seed=0))
    (folder / "problems.jsonl").write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    main()
