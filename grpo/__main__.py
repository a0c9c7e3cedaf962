"""All commands: `grpo`, or `python -m grpo`, lists them, and `grpo train …` runs `python -m grpo.train …`."""

import ast
import difflib
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = {
    **{name: f"grpo.{name}" for name in ("init", "train", "plan", "preflight", "evaluate", "report", "export", "chat")},
    **{name: f"grpo.{name}" for name in ("replay", "why", "doctor", "serve", "measure", "from_trl")},
    "check": "rewards.check",
}
"""The modules of the commands."""


def about(module: str) -> str:
    """Return the first sentence of a module's docstring, read without an import of its libraries."""
    docstring = ast.get_docstring(ast.parse((ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")))
    return re.split(r"[.:](?:\s|$)", docstring or "")[0]


def main() -> None:
    """Become the command of the first word, as typed with `python -m`; without a word list the commands."""
    word = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if word in ("--help", "-h"):
        width = max(map(len, COMMANDS))
        lines = [f"  {name:{width}}  {about(module)}" for name, module in COMMANDS.items()]
        print("\n".join(["usage: grpo COMMAND …", *lines]))
        print("`grpo COMMAND --help` describes a command; docs/README.md is a guide.")
        return
    if word not in COMMANDS:
        close = difflib.get_close_matches(word, COMMANDS, n=1)
        meant = f"did you mean {close[0]}?" if close else f"possible: {', '.join(COMMANDS)}"
        print(f"grpo: {word!r}: no such command; {meant}", file=sys.stderr)
        sys.exit(2)
    # in place of this process: launchers, sweeps and Hydra then see the module as the program, and the current folder
    os.execv(sys.executable, [sys.executable, "-m", COMMANDS[word], *sys.argv[2:]])


if __name__ == "__main__":
    main()
